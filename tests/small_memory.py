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
        patch.setattr("ssd_runtime.model.cache.kv_cache.LOOKBACK", 2)
        patch.setattr("ssd_runtime.model.cache.kv_cache.FORWARD_ROWS", 2 * SPARE)
        for module in ("sequence.session", "scheduler"):
            patch.setattr(f"ssd_runtime.engine.{module}.PREFILL_CHUNK", SPARE)
        for module in ("sequence.session", "job", "scheduler"):
            patch.setattr(f"ssd_runtime.engine.{module}.POOL_ROOM", ROOM)
        patch.setattr("ssd_runtime.engine.scheduler.PREFILL_ROWS", 2 * BLOCK)
        for module in ("sequence.session", "sequence.prompt_states", "prefix_cache"):
            patch.setattr(f"ssd_runtime.engine.{module}.BLOCK", BLOCK)
        yield
