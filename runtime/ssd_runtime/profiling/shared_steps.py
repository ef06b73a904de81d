"""Measures steps that several sequences share: many rows, and rows of many sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from ssd_profiles.arrays import Array
from ssd_runtime.model.batch.batch import Batch
from ssd_runtime.model.cache.kv_cache import KVCache
from ssd_runtime.model.cache.kv_pool import SPARE_SLOTS
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.profiling.rising import rising
from ssd_runtime.profiling.timer import Timer
from ssd_runtime.sampling.argmax import argmax

WIDE_QUERIES = (48, 64, 96, 128, 192, 256)
"""Numbers of rows beyond those of one verification."""
SEQUENCES = (2, 4, 8, 16, 32)
ROUNDS = 3
NONE = {name: np.empty(0) for name in ("wide_queries", "growth", "sequences", "joint")}
"""The fields of a `LatencyTable` about shared steps, where none was measured."""
CONTEXT = 16
"""Cached tokens of every sequence; they are few, so that many caches take little memory."""


@torch.inference_mode()
def measure_shared_steps(
    decoder: Decoder, last_query: int, budget_seconds: float, cache_bytes: int, timer: Timer
) -> dict[str, Array]:
    """Measure medians of whole steps, each next to the step that it is compared with; returns the fields of `NONE`.

    Points are measured in ascending order while they fit the budget (half of it for sequences), the model's context
    and `cache_bytes`.
    """
    began = timer.spent
    room = decoder.shape.max_context - CONTEXT
    wide = [n for n in WIDE_QUERIES if last_query < n <= room]
    slots = cache_bytes // decoder.kv_layout.bytes_per_slot
    many = [n for n in SEQUENCES if n <= room and n * (CONTEXT + 1 + SPARE_SLOTS) <= slots]
    caches = [decoder.new_cache()]

    def growth(n: int) -> float:
        return _timed(decoder, caches[:1], n, timer) / _timed(decoder, caches[:1], last_query, timer)

    def joint(n: int) -> float:
        caches.extend(decoder.new_cache() for _ in range(n - len(caches)))
        return _timed(decoder, caches[:n], 1, timer) - _timed(decoder, caches[:1], n, timer)

    sequences, extra = _measured(joint, many, budget_seconds / 2, timer)
    wide_queries, grown = _measured(growth, wide, budget_seconds - (timer.spent - began), timer)
    return {
        "wide_queries": wide_queries,
        "growth": rising(np.maximum(grown, 1.0)),
        "sequences": sequences,
        "joint": rising(np.maximum(extra, 0.0)),
    }


def _measured(
    measure: Callable[[int], float], points: Sequence[int], budget_seconds: float, timer: Timer
) -> tuple[Array, Array]:
    """The points that fit the budget, and the median of each one's rounds."""
    taken = list[int]()
    medians = list[float]()
    left = budget_seconds
    before = 0.0
    for point in points:
        # A row takes about as long as at the last point, so a point that would not fit is not begun.
        if before * point / (taken[-1] if taken else 1) >= left:
            break
        began = timer.spent
        measure(point)  # the first step of a size sets up kernels and memory
        if (ROUNDS + 1) * (timer.spent - began) > left:
            break
        medians.append(float(np.median([measure(point) for _ in range(ROUNDS)])))
        taken.append(point)
        before = timer.spent - began
        left -= before
    return np.asarray(taken, float), np.asarray(medians, float)


def _timed(decoder: Decoder, caches: Sequence[KVCache], rows: int, timer: Timer) -> float:
    """Seconds of a step with `rows` rows of each cache, from tokens to the choice of the next ones."""
    for cache in caches:
        cache.reserve(CONTEXT + rows)
    ids = decoder.probe_ids(rows * len(caches))

    def step() -> None:
        batch = Batch.of([decoder.batches.timed(cache, CONTEXT, rows) for cache in caches])
        argmax(decoder.logits(decoder.run(decoder.embed(ids), batch))).tolist()

    return timer(step)
