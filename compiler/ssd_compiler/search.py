"""The masks of a domain: candidates, evaluation, Bayesian refinement, frontier."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from ssd_artifacts.domain_config import FrontierEntry, SearchCost
from ssd_compiler.bayesian import optimise
from ssd_compiler.evaluate import Evaluator
from ssd_compiler.frontier import select_finalists, select_frontier
from ssd_profiles.acceptance import Trace
from ssd_profiles.formulas import expected_tokens
from ssd_profiles.latency import LatencyTable
from ssd_profiles.mask import SkipMask
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.planning.cost import CostModel
from ssd_runtime.search.knapsack import Candidate, Weights, search_knapsack
from ssd_runtime.search.replay import ReferenceStates

KNAPSACK_ROWS = 24
"""Tokens whose states the dynamic programme carries along; more sharpen it little and cost in proportion."""
KNAPSACK_SHARE = 0.35
"""Share of the evaluations, and of the time where that is bounded, spent on its candidates, spread over the budgets;
the best budget's neighbours follow, with half as much."""
UNIFORM_SHARES = (0.1, 0.2, 0.3, 0.4, 0.5)
RANDOM_MASKS = 4
WORTHWHILE = 0.97
"""Predicted speed-up of the best of knapsack and uniform masks below which a longer search is left out: no refinement
seen so far has added more than one or two percent to it."""


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
    """Whether the first candidates promised enough for the long search."""
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

    The knapsack's candidates and uniform masks come first. They tell what can be gained here: `announce` receives their
    speed-up with perfect foresight, the predicted one and whether that is worth more search. If so, random masks
    follow, then Bayesian optimisation started from all of them.
    """
    began = perf_counter()
    evaluator = Evaluator(
        decoder, reference, latency, context, bounds.block, bounds.evaluations, began + bounds.seconds, tick, began
    )
    forwards = _rate_knapsack(evaluator, bounds.seconds)
    layers = decoder.shape.num_layers
    if not evaluator.rated:
        evaluator.rate(next(uniform_masks(layers)), "uniform")
    evaluator.rate_all(uniform_masks(layers), "uniform")
    best = evaluator.best()
    worthwhile = best.speedup >= WORTHWHILE
    announce(_potential(evaluator), best.speedup, worthwhile)
    if worthwhile:
        evaluator.rate_all(random_masks(layers, best.mask, bounds.seed), "random")
        optimise(evaluator, bounds.seed)
    frontier = select_frontier(list(evaluator.rated.values()), latency, context, decoder.shape.max_context)
    return SearchResult(
        [
            FrontierEntry.of(rated.mask, rated.origin, rated.profile, latency.draft_cost(rated.mask, context))
            for rated in frontier
        ],
        select_finalists(frontier),
        context,
        _potential(evaluator),
        worthwhile,
        SearchCost(
            seconds=round(perf_counter() - began, 2),
            evaluations=len(evaluator.rated),
            target_forwards=round(evaluator.forwards + forwards, 2),
            progress=[(round(seconds, 2), round(speedup, 4)) for seconds, speedup in evaluator.progress],
        ),
    )


def _rate_knapsack(evaluator: Evaluator, seconds: float) -> float:
    """Evaluate candidates over all budgets, then those next to the best; returns the search's own work.

    They get their share of `seconds`, the time of the whole search.
    """
    reference, decoder = evaluator.reference, evaluator.decoder
    sampled = reference.every(max(1, len(reference) // KNAPSACK_ROWS))
    weights = Weights.of(evaluator.latency, evaluator.context)
    found = [candidate for candidate in search_knapsack(decoder, sampled, weights) if candidate.skipped_weight]
    share = max(2, int(KNAPSACK_SHARE * evaluator.most))
    # The most promising first: those far behind it then cost a quarter of an evaluation.
    coarse = sorted(_spread(found, share), key=lambda candidate: -_promise(evaluator, candidate))
    if not coarse:
        return 0.0
    # At least one, however little time is left: what follows compares with it.
    evaluator.rate(coarse[0].mask, "knapsack")
    until = evaluator.began + KNAPSACK_SHARE * seconds
    evaluator.rate_all((candidate.mask for candidate in coarse[1:]), "knapsack", until)
    masks = [candidate.mask for candidate in found]
    best = masks.index(evaluator.best().mask)
    nearby = sorted(range(len(masks)), key=lambda i: abs(i - best))
    until += KNAPSACK_SHARE / 2 * seconds
    evaluator.rate_all((masks[i] for i in nearby[: share // 2]), "knapsack", until)
    # Every budget carries the sampled rows through every sub-layer.
    return len(found) * len(sampled) / len(reference)


def _promise(evaluator: Evaluator, candidate: Candidate) -> float:
    """TPT at four draft tokens, from the agreement on the few rows of the dynamic programme."""
    tokens = expected_tokens(candidate.token_agreement, 4)
    return CostModel(evaluator.latency).tokens_per_second(evaluator.context, tokens, 4, candidate.mask)


def _potential(evaluator: Evaluator) -> float:
    """The speed-up if every draft ended just before its first wrong token, by whichever mask so far brings most then.

    No draft length or confidence threshold can do better with these masks.
    """
    latency, context = evaluator.latency, evaluator.context
    costs, best = CostModel(latency).at(context), 1.0
    for rated in (each for each in evaluator.rated.values() if each.complete):
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
    """Evenly spread whole layers, first and last kept, for several shares."""
    for share in UNIFORM_SHARES:
        yield SkipMask.uniform(num_layers, max(1, round(share * (num_layers - 2))))


def random_masks(num_layers: int, like: SkipMask, seed: int) -> Iterator[SkipMask]:
    """Random sub-layers, as many as the mask `like` skips."""
    count, picker = len(list(like)), random.Random(seed)
    for _ in range(RANDOM_MASKS):
        yield SkipMask.of(num_layers, picker.sample(range(2 * num_layers), count))


def _spread(candidates: list[Candidate], count: int) -> list[Candidate]:
    picks = np.unique(np.linspace(0, len(candidates) - 1, min(count, len(candidates))).round().astype(int))
    return [candidates[i] for i in picks]
