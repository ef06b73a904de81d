"""Selects the masks that go into the bundle, and those that are validated by timing."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from ssd_compiler.search.evaluate import Rated
from ssd_profiles.latency import LatencyTable
from ssd_profiles.mask import SubLayerPlan
from ssd_runtime.planning.cost import CostModel

FRONTIER_ENTRIES = 24
"""Most masks of a frontier. Some are chosen as for a device without light copies, if there are light masks."""
FRONTIER_CONTEXTS = (128, 512, 2048, 8192, 32768)
FINALISTS = 3
FULL_BITS = 32
"""Bits of weights that are in full, for comparison with light ones."""
NEARLY_SAME = 0.85
"""Jaccard similarity from which timing could hardly tell two masks apart."""


def select_frontier(rated: list[Rated], latency: LatencyTable, context: int, max_context: int) -> list[Rated]:
    """Select the Pareto-optimal masks by token agreement and by mixers and MLPs skipped or light.

    Latencies do not matter for that, so the frontier serves on any device. Masks that were rated on part of the text
    only are excluded. If there are too many, the fastest ones on this device are kept, at the domain's own and at other
    context lengths up to `max_context`. The result is ordered by the number of skipped sub-layers.
    """
    kept = [one for one in rated if one.complete and not one.mask.is_plain]
    figures = np.array([(*_lightness(one.mask), one.option.entry.profile.token_agreement) for one in kept])
    undominated = [one for one, mine in zip(kept, figures, strict=True) if not _is_dominated(mine, figures)]
    lengths = (context, *(length for length in FRONTIER_CONTEXTS if length <= max_context))
    orders = [sorted(undominated, key=lambda one: -_speed_at(one, latency, length)) for length in lengths]
    if any(one.mask.light for one in undominated):
        in_full = replace(latency, light={})
        orders.insert(2, sorted(undominated, key=lambda one: -_speed_at(one, in_full, context)))
    chosen: list[Rated] = []
    for one in chain.from_iterable(zip(*orders, strict=True)):
        if one not in chosen and len(chosen) < FRONTIER_ENTRIES:
            chosen.append(one)
    return sorted(chosen, key=lambda one: (len(list(one.mask)), one.mask.hex()))


def select_finalists(frontier: list[Rated]) -> list[int]:
    """Indices of the fastest entries, without masks nearly equal to a faster one."""
    chosen: list[int] = []
    for index in sorted(range(len(frontier)), key=lambda i: -frontier[i].speedup):
        mask = frontier[index].mask
        if len(chosen) < FINALISTS and all(mask.jaccard(frontier[other].mask) < NEARLY_SAME for other in chosen):
            chosen.append(index)
    return chosen


def _speed_at(rated: Rated, latency: LatencyTable, context: int) -> float:
    option = CostModel(latency).best_option([rated.option.entry], context)
    return option.tokens_per_second if option is not None else 0.0


def _is_dominated(mine: NDArray[np.float64], figures: NDArray[np.float64]) -> bool:
    """Whether any row of `figures` [masks, figures] is at least as good as `mine` in all, and better in one."""
    return bool(np.any(np.all(figures >= mine, axis=1) & np.any(figures > mine, axis=1)))


def _lightness(mask: SubLayerPlan) -> list[int]:
    """Numbers of mixers, of MLPs and of heads that are skipped, in 4 bits or less, and in 8 or less."""
    bits_of = [0 if skip else mask.bits_of(i) or FULL_BITS for i, skip in enumerate(mask.skipped)]
    head = [mask.head_bits or FULL_BITS]
    return [sum(bits <= most for bits in part) for most in (0, 4, 8) for part in (bits_of[0::2], bits_of[1::2], head)]
