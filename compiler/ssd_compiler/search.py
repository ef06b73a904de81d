"""The masks of a domain: candidates, evaluation, Bayesian refinement, frontier."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from ssd_artifacts.domain_record import FrontierEntry, SearchCost
from ssd_compiler.bayesian import optimise
from ssd_compiler.evaluate import Evaluator, Rated
from ssd_profiles.acceptance import Trace
from ssd_profiles.formulas import tokens_per_time
from ssd_profiles.latency import LatencyTable
from ssd_profiles.mask import SkipMask
from ssd_runtime.decoder import Decoder
from ssd_runtime.knapsack import Candidate, Weights, search_knapsack
from ssd_runtime.planning.throughput import Entry, StepCosts, best_option
from ssd_runtime.states import ReferenceStates

KNAPSACK_ROWS = 24
"""Tokens whose states the dynamic programme carries along; more sharpen it little and cost in proportion."""
KNAPSACK_SHARE = 0.35
"""Share of the evaluations spent on its candidates, spread over the budgets; the best budget's neighbours follow."""
UNIFORM_SHARES = (0.1, 0.2, 0.3, 0.4, 0.5)
RANDOM_MASKS = 4
WORTHWHILE = 0.97
"""Predicted speed-up of the knapsack's best below which a longer search is left out: no refinement seen so far has
added more than one or two percent to it."""
FRONTIER_ENTRIES = 24
FRONTIER_CONTEXTS = (128, 512, 2048, 8192, 32768)
FINALISTS = 3
NEARLY_SAME = 0.85
"""Jaccard similarity of masks that timing would hardly tell apart."""


@dataclass(frozen=True, slots=True)
class SearchBounds:
    """How long a search may go on."""

    evaluations: int
    seconds: float
    seed: int
    block: int


@dataclass(frozen=True, slots=True)
class SearchResult:
    """What a search found, best first where order matters."""

    frontier: list[FrontierEntry]
    finalists: list[int]
    """Indices into the frontier, by predicted speed-up at the domain's context."""
    context: int
    potential: float
    worthwhile: bool
    """Whether the knapsack's candidates promised enough for the long search."""
    cost: SearchCost


def search(
    decoder: Decoder,
    reference: ReferenceStates,
    latency: LatencyTable,
    context: int,
    bounds: SearchBounds,
    tick: Callable[[], None],
    announce: Callable[[float, float, bool], None],
) -> SearchResult:
    """Find a domain's frontier.

    The knapsack's candidates and uniform masks come first. They tell what can be gained here: `announce` receives the
    speed-up with perfect foresight, the predicted one and whether that is worth more search. If so, random masks
    follow, then Bayesian optimisation started from all of them.
    """
    began = perf_counter()
    evaluator = Evaluator(
        decoder, reference, latency, context, bounds.block, bounds.evaluations, began + bounds.seconds, tick
    )
    forwards = _rate_knapsack(evaluator)
    layers = decoder.shape.num_layers
    evaluator.rate_all(uniform_masks(layers), "uniform")
    potential, best = _potential(evaluator), evaluator.best()
    worthwhile = best.speedup >= WORTHWHILE
    announce(potential, best.speedup, worthwhile)
    if worthwhile:
        evaluator.rate_all(random_masks(layers, best.mask, bounds.seed), "random")
        optimise(evaluator, bounds.seed)
    frontier = select_frontier(list(evaluator.rated.values()), latency, context)
    return SearchResult(
        [
            FrontierEntry.of(rated.mask, rated.origin, rated.profile, latency.draft_cost(rated.mask, context))
            for rated in frontier
        ],
        _finalists(frontier),
        context,
        potential,
        worthwhile,
        SearchCost(
            seconds=round(perf_counter() - began, 2),
            evaluations=len(evaluator.rated),
            target_forwards=round(evaluator.forwards + forwards, 2),
        ),
    )


def _rate_knapsack(evaluator: Evaluator) -> float:
    """Evaluate candidates over all budgets, then those next to the best; returns the search's own work."""
    reference, decoder = evaluator.reference, evaluator.decoder
    sampled = reference.every(max(1, len(reference) // KNAPSACK_ROWS))
    weights = Weights.of(evaluator.latency, evaluator.context)
    found = [candidate for candidate in search_knapsack(decoder, sampled, weights) if candidate.skipped_weight]
    share = max(2, int(KNAPSACK_SHARE * evaluator.most))
    # The most promising first: those far behind it then cost a quarter of an evaluation.
    coarse = sorted(_spread(found, share), key=lambda candidate: -_promise(evaluator, candidate))
    evaluator.rate_all((candidate.mask for candidate in coarse), "knapsack")
    masks = [candidate.mask for candidate in found]
    best = masks.index(evaluator.best().mask)
    nearby = sorted(range(len(masks)), key=lambda i: abs(i - best))
    evaluator.rate_all((masks[i] for i in nearby[: share // 2]), "knapsack")
    # Every budget carries the sampled rows through every sub-layer.
    return len(found) * len(sampled) / len(reference)


def _promise(evaluator: Evaluator, candidate: Candidate) -> float:
    """TPT at four draft tokens, from the agreement on the few rows of the dynamic programme."""
    latency, context = evaluator.latency, evaluator.context
    draft = latency.step_seconds(context, 1, candidate.mask)
    return tokens_per_time(candidate.token_agreement, 4, draft, latency.step_seconds(context, 5))


def _potential(evaluator: Evaluator) -> float:
    """The speed-up if every draft ended just before its first wrong token, for the best mask rated so far.

    An optimistic bound: no draft length or confidence threshold can do better with these masks.
    """
    latency, context = evaluator.latency, evaluator.context
    costs, best = StepCosts.at(latency, context), 1.0
    for rated in evaluator.rated.values():
        draft = latency.step_seconds(context, 1, rated.mask)
        for length in rated.profile.draft_lengths:
            runs = np.asarray([run for trace in rated.traces for run in _perfect_runs(trace, length)])
            seconds = runs.sum() * draft + costs.verification(runs).sum()
            best = max(best, float((runs.sum() + runs.size) * costs.plain / seconds))
    return best


def _perfect_runs(trace: Trace, length: int) -> Iterator[int]:
    """Accepted tokens of each cycle when drafting stops by foresight, `length` at most."""
    position = 0
    while position < len(trace.matches):
        wrong = np.flatnonzero(~trace.matches[position : position + length])
        run = int(wrong[0]) if wrong.size else len(trace.matches[position : position + length])
        yield run
        position += run + 1


def uniform_masks(num_layers: int) -> Iterator[SkipMask]:
    """Evenly spread whole layers, first and last kept (SWIFT's starting point), for several shares."""
    for share in UNIFORM_SHARES:
        count = max(1, round(share * (num_layers - 2))) if num_layers > 2 else 0
        layers = np.linspace(1, num_layers - 2, count).round().astype(int)
        yield SkipMask.of(num_layers, {2 * int(layer) + part for layer in layers for part in (0, 1)})


def random_masks(num_layers: int, like: SkipMask, seed: int) -> Iterator[SkipMask]:
    """Random sub-layers, as many as the mask `like` skips."""
    count, picker = len(list(like)), random.Random(seed)
    for _ in range(RANDOM_MASKS):
        yield SkipMask.of(num_layers, picker.sample(range(2 * num_layers), count))


def select_frontier(rated: list[Rated], latency: LatencyTable, context: int) -> list[Rated]:
    """The masks that no other one beats in attention skipped, MLPs skipped and token agreement at once.

    Latencies play no part in that, so that the frontier serves on any device. Of too many, those fastest here at
    the domain's own and at other context lengths stay. Ordered by what they skip.
    """
    kept = [one for one in rated if one.complete]
    undominated = [one for one in kept if not any(_dominates(other, one) for other in kept)]
    chosen: list[Rated] = []
    for rank in range(len(undominated)):
        for length in (context, *FRONTIER_CONTEXTS):
            ranked = sorted(undominated, key=lambda one: -_speed_at(one, latency, length))
            if ranked[rank] not in chosen and len(chosen) < FRONTIER_ENTRIES:
                chosen.append(ranked[rank])
    return sorted(chosen, key=lambda one: (len(list(one.mask)), one.mask.hex()))


def _finalists(frontier: list[Rated]) -> list[int]:
    """The fastest entries, leaving out those that are nearly the same mask as a faster one."""
    chosen: list[int] = []
    for index in sorted(range(len(frontier)), key=lambda i: -frontier[i].speedup):
        mask = frontier[index].mask
        if len(chosen) < FINALISTS and all(mask.jaccard(frontier[other].mask) < NEARLY_SAME for other in chosen):
            chosen.append(index)
    return chosen


def _speed_at(rated: Rated, latency: LatencyTable, context: int) -> float:
    option = best_option([Entry("", rated.mask, rated.profile)], latency, context)
    return option.tokens_per_second if option is not None else 0.0


def _dominates(one: Rated, other: Rated) -> bool:
    mine = (one.mask.attention_skipped, one.mask.mlp_skipped, one.profile.token_agreement)
    theirs = (other.mask.attention_skipped, other.mask.mlp_skipped, other.profile.token_agreement)
    return all(a >= b for a, b in zip(mine, theirs, strict=True)) and mine != theirs


def _spread(candidates: list[Candidate], count: int) -> list[Candidate]:
    picks = np.unique(np.linspace(0, len(candidates) - 1, min(count, len(candidates))).round().astype(int))
    return [candidates[i] for i in picks]
