"""Which of the masks that a search has rated go into the bundle, and which are timed."""

from __future__ import annotations

from itertools import chain

from ssd_compiler.evaluate import Rated
from ssd_profiles.latency import LatencyTable
from ssd_runtime.planning.cost import CostModel, Entry

FRONTIER_ENTRIES = 24
FRONTIER_CONTEXTS = (128, 512, 2048, 8192, 32768)
FINALISTS = 3
NEARLY_SAME = 0.85
"""Jaccard similarity of masks that timing would hardly tell apart."""


def select_frontier(rated: list[Rated], latency: LatencyTable, context: int, max_context: int) -> list[Rated]:
    """The masks that no other one beats in attention skipped, MLPs skipped and token agreement at once.

    Latencies play no part in that, so that the frontier serves on any device; but masks that a first look found far
    behind here were rated on some of the text only, and are left out. Of too many, those fastest here at the domain's
    own and at other context lengths, up to the model's `max_context`, stay. Ordered by what they skip.
    """
    kept = [one for one in rated if one.complete and any(one.mask.bits)]
    undominated = [one for one in kept if not any(_dominates(other, one) for other in kept)]
    orders = [
        sorted(undominated, key=lambda one: -_speed_at(one, latency, length))
        for length in (context, *(length for length in FRONTIER_CONTEXTS if length <= max_context))
    ]
    chosen: list[Rated] = []
    for one in chain.from_iterable(zip(*orders, strict=True)):
        if one not in chosen and len(chosen) < FRONTIER_ENTRIES:
            chosen.append(one)
    return sorted(chosen, key=lambda one: (len(list(one.mask)), one.mask.hex()))


def select_finalists(frontier: list[Rated]) -> list[int]:
    """The fastest entries, leaving out those that are nearly the same mask as a faster one."""
    chosen: list[int] = []
    for index in sorted(range(len(frontier)), key=lambda i: -frontier[i].speedup):
        mask = frontier[index].mask
        if len(chosen) < FINALISTS and all(mask.jaccard(frontier[other].mask) < NEARLY_SAME for other in chosen):
            chosen.append(index)
    return chosen


def _speed_at(rated: Rated, latency: LatencyTable, context: int) -> float:
    option = CostModel(latency).best_option([Entry("", rated.mask, rated.profile)], context)
    return option.tokens_per_second if option is not None else 0.0


def _dominates(one: Rated, other: Rated) -> bool:
    mine = (one.mask.attention_skipped, one.mask.mlp_skipped, one.profile.token_agreement)
    theirs = (other.mask.attention_skipped, other.mask.mlp_skipped, other.profile.token_agreement)
    return all(a >= b for a, b in zip(mine, theirs, strict=True)) and mine != theirs
