"""The search for a domain's masks: candidates, evaluation, Bayesian refinement, frontier."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np
from pydantic import BaseModel

from ssd_artifacts.domain_config import MAX_PROGRESS, FrontierEntry, SearchCost
from ssd_compiler.progress import Tick
from ssd_compiler.search.bayesian import optimise
from ssd_compiler.search.evaluate import Evaluator
from ssd_compiler.search.frontier import select_finalists, select_frontier
from ssd_compiler.search.self_sd import search_by_clock
from ssd_compiler.search.simple_masks import random_masks, uniform_masks, with_light
from ssd_compiler.settings import SearchMethod
from ssd_profiles.acceptance import Trace
from ssd_profiles.formulas import expected_tokens
from ssd_profiles.latency import LatencyTable
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.model.runner import ModelRunner
from ssd_runtime.planning.cost import CostModel
from ssd_runtime.search.knapsack import Candidate, searching_knapsack
from ssd_runtime.search.replay import ReferenceStates
from ssd_runtime.search.weights import Weights

KNAPSACK_ROWS = 24
"""Rows that the dynamic programme carries along. More rows improve it little and cost in proportion."""
KNAPSACK_SHARE = 0.5
"""Share for knapsack candidates spread over the budgets, of the evaluations and the time that are not reserved for
Bayesian optimisation. Neighbours of the best budget then get half as much."""
RESERVED = 0.25
"""Least share of the evaluations, and of the time if bounded, that is reserved for Bayesian optimisation."""
RESERVED_EVALUATIONS = 64
"""Evaluations that are reserved for it where they are no more than half of all."""
KNAPSACK_STATES = 24
"""Budgets that a dynamic programme carries along where sub-layers may be light, and each is run in all bits."""
LIGHT_BUDGET = 0.9
"""Largest share of the latency that light and skipped sub-layers may save together."""
WORTHWHILE = 0.97
"""Predicted speed-up of the best knapsack or uniform mask below which the long search is skipped. Where sub-layers are
weak one by one, no refinement has added more than two percent; where they matter only together, up to thirteen."""


@dataclass(frozen=True, slots=True)
class SearchBounds:
    """Limits of a search: evaluations, seconds, the random seed, the assumed draft length and the method.

    `look` is the evaluator's.
    """

    evaluations: int
    seconds: float
    seed: int
    block: int
    method: SearchMethod = "both"
    look: int = 1

    @property
    def reserved(self) -> int:
        """Evaluations that are left for Bayesian optimisation."""
        return max(int(RESERVED * self.evaluations), min(RESERVED_EVALUATIONS, self.evaluations // 2))


class SearchResult(BaseModel):
    """Outcome of a search."""

    frontier: list[FrontierEntry]
    finalists: list[int]
    """Indices into the frontier, by descending predicted speed-up at the domain's context."""
    context: int
    oracle_speedup: float
    worthwhile: bool
    """Whether the first candidates justified the long search."""
    cost: SearchCost


def search(
    decoder: Decoder,
    reference: ReferenceStates,
    latency: LatencyTable,
    context: int,
    bounds: SearchBounds,
    tick: Tick,
    announce: Callable[[float, float, bool], None],
    prompts: Sequence[list[int]] = (),
) -> SearchResult:
    """Search a domain's frontier by the method of `bounds`.

    By `both`, uniform precisions, knapsack candidates and uniform masks come first. `announce` receives their oracle
    speed-up, their predicted speed-up and whether that justifies the long search. If it does, random masks follow, then
    Bayesian optimisation, for which evaluations were reserved. The other methods do one part alone, and ask nobody
    whether it is justified: `knapsack`, `bayesian` from uniform and random masks, or `self-sd`, which times drafts of
    `prompts`. The first two begin with uniform precisions as well.
    `tick` is called after each evaluation.
    """
    began = perf_counter()
    evaluator = Evaluator(
        decoder=decoder,
        reference=reference,
        latency=latency,
        context=context,
        block=bounds.block,
        most=bounds.evaluations,
        deadline=began + bounds.seconds,
        tick=tick,
        look=bounds.look,
        began=began,
    )
    layers = decoder.shape.num_layers
    forwards = 0.0
    timed = 0
    if bounds.method in ("both", "knapsack", "bayesian"):
        evaluator.rate_all(decoder.light.masks, "light")
    if bounds.method == "self-sd":
        timed = search_by_clock(evaluator, prompts, bounds.seed)
    elif bounds.method == "knapsack":
        forwards = _rate_knapsack(evaluator, bounds.evaluations, bounds.seconds)
    elif bounds.method == "bayesian":
        _rate_simple(evaluator, bounds.seed)
        optimise(evaluator, bounds.seed)
    else:
        forwards = _rate_first(evaluator, bounds)
    if not evaluator.rated:
        evaluator.rate(next(uniform_masks(layers)), "uniform")
    best = evaluator.best()
    worthwhile = best.speedup >= WORTHWHILE
    announce(_oracle_speedup(evaluator), best.speedup, worthwhile)
    if worthwhile and bounds.method == "both":
        evaluator.most = bounds.evaluations - bounds.reserved
        evaluator.rate_all(random_masks(layers, best.mask, bounds.seed), "random")
        evaluator.most = bounds.evaluations
        optimise(evaluator, bounds.seed)
    return _result(evaluator, worthwhile, forwards, timed)


def _result(evaluator: Evaluator, worthwhile: bool, forwards: float, timed: int) -> SearchResult:
    """The frontier of all rated masks, and the cost with `forwards` of dynamic programmes and `timed` drafts."""
    latency, context = evaluator.latency, evaluator.context
    longest = evaluator.decoder.shape.max_context
    frontier = select_frontier(list(evaluator.rated.values()), latency, context, longest)
    return SearchResult(
        frontier=[
            FrontierEntry.of(
                mask=rated.mask,
                origin=rated.origin,
                profile=rated.option.entry.profile,
                draft_cost=rated.option.draft_cost,
            )
            for rated in frontier
        ],
        finalists=select_finalists(frontier),
        context=context,
        oracle_speedup=_oracle_speedup(evaluator),
        worthwhile=worthwhile,
        cost=SearchCost(
            seconds=round(perf_counter() - evaluator.began, 2),
            evaluations=timed or len(evaluator.rated),
            target_forwards=round(evaluator.forwards + forwards, 2),
            progress=[(round(seconds, 2), round(speedup, 4)) for seconds, speedup in evaluator.progress],
            rated=[(each.mask.hex(), each.origin, round(each.speedup, 4)) for each in evaluator.rated.values()][
                :MAX_PROGRESS
            ],
        ),
    )


def _rate_first(evaluator: Evaluator, bounds: SearchBounds) -> float:
    """Evaluate knapsack candidates, then uniform masks, without what is reserved for Bayesian optimisation.

    Returns the cost of the dynamic programme in forwards of all rows.
    """
    first = bounds.evaluations - bounds.reserved
    seconds = (1.0 - RESERVED) * bounds.seconds
    whole = evaluator.most, evaluator.deadline
    evaluator.most = first
    evaluator.deadline = evaluator.began + seconds
    forwards = _rate_knapsack(evaluator, KNAPSACK_SHARE * first, KNAPSACK_SHARE * seconds)
    layers = evaluator.decoder.shape.num_layers
    evaluator.rate_all(with_light(uniform_masks(layers), evaluator.usual), "uniform")
    evaluator.most, evaluator.deadline = whole
    return forwards


def _rate_simple(evaluator: Evaluator, seed: int) -> None:
    """Evaluate uniform and random masks, the first one even without any time left."""
    layers = evaluator.decoder.shape.num_layers
    evaluator.rate(next(uniform_masks(layers)), "uniform")
    evaluator.rate_all(with_light(uniform_masks(layers), evaluator.usual), "uniform")
    evaluator.rate_all(random_masks(layers, evaluator.best().mask, seed), "random")


def _rate_knapsack(evaluator: Evaluator, evaluations: float, seconds: float) -> float:
    """Evaluate knapsack candidates: of skipping alone, and where there are light copies, of all precisions as well.

    Each kind has half of the evaluations and the time then. Returns the cost of the dynamic programmes in forwards of
    all rows.
    """
    reference = evaluator.reference
    decoder = evaluator.decoder
    runner = ModelRunner(decoder)
    sampled = reference.every(max(1, len(reference) // KNAPSACK_ROWS))
    plain = Weights.of(evaluator.latency, evaluator.context)
    if not decoder.light.bits:
        found = runner.finish(searching_knapsack(decoder, sampled, plain))
        return _rate_candidates(evaluator, found, len(sampled), evaluations, seconds)
    fine = Weights.fine(evaluator.latency, evaluator.context, decoder.light.bits_of_each)
    mixed = runner.finish(searching_knapsack(decoder, sampled, fine, budget=LIGHT_BUDGET, most=KNAPSACK_STATES))
    forwards = _rate_candidates(evaluator, mixed, len(sampled), evaluations / 2, seconds / 2)
    found = runner.finish(searching_knapsack(decoder, sampled, plain, most=KNAPSACK_STATES))
    # Each precision carries the states through its own weights.
    return forwards * (1 + len(decoder.light.bits)) + _rate_candidates(
        evaluator, found, len(sampled), evaluations / 2, seconds
    )


def _rate_candidates(
    evaluator: Evaluator, candidates: Sequence[Candidate], rows: int, evaluations: float, seconds: float
) -> float:
    """Evaluate some `evaluations` candidates over all budgets, then half as many neighbours of the best one.

    The former may take `seconds` of the search, the latter half as many. Returns the cost of a dynamic programme on
    `rows` rows in forwards of all rows.
    """
    reference = evaluator.reference
    found = [candidate for candidate in candidates if candidate.skipped_weight]
    share = max(2, int(evaluations))
    # The most promising candidate comes first, so that masks far behind it cost only a quarter of an evaluation.
    coarse = sorted(_spread(found, share), key=lambda candidate: -_promise(evaluator, candidate))
    if not coarse:
        return 0.0
    # One candidate is always evaluated, because everything after it compares with the best.
    evaluator.rate(coarse[0].mask, "knapsack")
    until = evaluator.began + seconds
    evaluator.rate_all((candidate.mask for candidate in coarse[1:]), "knapsack", until)
    masks = [candidate.mask for candidate in found]
    known = ((evaluator.rated.get(mask), i) for i, mask in enumerate(masks))
    best = max(((rated.speedup, i) for rated, i in known if rated is not None and rated.complete), default=(0.0, 0))[1]
    nearby = sorted(range(len(masks)), key=lambda i: abs(i - best))
    until += seconds / 2
    evaluator.rate_all((masks[i] for i in nearby[: share // 2]), "knapsack", until)
    # Every budget carries the sampled rows through every sub-layer.
    return len(found) * rows / len(reference)


def _promise(evaluator: Evaluator, candidate: Candidate) -> float:
    """TPT at four draft tokens, with the token agreement on the few rows of the dynamic programme."""
    tokens = expected_tokens(candidate.token_agreement, 4)
    return CostModel(evaluator.latency).tokens_per_second(evaluator.context, tokens, 4, candidate.mask)


def _oracle_speedup(evaluator: Evaluator) -> float:
    """Best speed-up of any mask so far if every draft stopped just before its first wrong token.

    This bounds what these masks can reach with any draft length and confidence threshold.
    """
    latency = evaluator.latency
    context = evaluator.context
    costs = CostModel(latency).at(context)
    best = 1.0
    for rated in (each for each in evaluator.rated.values() if each.complete):
        draft = latency.step_seconds(context, 1, rated.mask)
        for length in rated.option.entry.profile.draft_lengths:
            runs = np.asarray([run for trace in rated.traces for run in _perfect_runs(trace, length)])
            seconds = runs.sum() * draft + costs.verification(runs).sum()
            best = max(best, float((runs.sum() + runs.size) * costs.plain / seconds))
    return best


def _perfect_runs(trace: Trace, length: int) -> Iterator[int]:
    """Accepted tokens of each cycle if a draft of at most `length` tokens stops before its first wrong one."""
    position = 0
    while position < len(trace.matches):
        wrong = np.flatnonzero(~trace.matches[position : position + length])
        run = int(wrong[0]) if wrong.size else len(trace.matches[position : position + length])
        yield run
        position += run + 1


def _spread(candidates: list[Candidate], count: int) -> list[Candidate]:
    picks = np.unique(np.linspace(0, len(candidates) - 1, min(count, len(candidates))).round().astype(int))
    return [candidates[i] for i in picks]
