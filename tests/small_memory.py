"""Sizes of caches and pools so small that tiny models fill them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

SPARE, ROOM, BLOCK = 24, 8, 4


@contextmanager
def small_memory() -> Iterator[None]:
    """Windows slide, pools fill and prefixes count after a few tokens."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("model.cache.kv_cache", "model.cache.kv_pool", "engine.job", "engine.scheduler"):
            patch.setattr(f"ssd_runtime.{module}.SPARE_SLOTS", SPARE)
        for module in ("kv_cache", "kv_pool"):
            patch.setattr(f"ssd_runtime.model.cache.{module}.LOOKBACK", 2)
        patch.setattr("ssd_runtime.model.cache.kv_pool.FORWARD_ROWS", 2 * SPARE)
        for module in ("sequence.session", "engine.scheduler"):
            patch.setattr(f"ssd_runtime.{module}.PREFILL_CHUNK", SPARE)
        for module in ("sequence.session", "engine.job", "engine.scheduler"):
            patch.setattr(f"ssd_runtime.{module}.POOL_ROOM", ROOM)
        patch.setattr("ssd_runtime.engine.scheduler.PREFILL_ROWS", 2 * BLOCK)
        for module in ("session", "prompt_states", "prefix_cache"):
            patch.setattr(f"ssd_runtime.sequence.{module}.BLOCK", BLOCK)
        yield
