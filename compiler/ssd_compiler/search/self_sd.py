"""The search of Self-SD and KNN-SSD: Bayesian optimisation over all sub-layers, by the clock."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from ssd_compiler.search.evaluate import Evaluator
from ssd_compiler.search.vertices import optimiser
from ssd_profiles.mask import SubLayerPlan
from ssd_runtime.engine.loop import generate
from ssd_runtime.engine.output.output import Limits
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.planning.plan import ConstantPlanner, Plan
from ssd_runtime.sequence.session import Session

PROMPTS = 8
NEW_TOKENS = 32
DRAFT_LENGTH = 12
STOP = 0.8
"""Drafting ends after a token less probable than this."""
KEPT = 8
"""Fastest masks by the clock, whose acceptance is then measured as for any other."""


def search_by_clock(evaluator: Evaluator, prompts: Sequence[list[int]], seed: int) -> int:
    """Time drafts with one mask after the other until the evaluator's bounds, then rate the `KEPT` fastest.

    Returns the number of masks that were timed.

    The optimiser has 2L variables in [0, 1], and a sub-layer is skipped from one half on. Each evaluation decodes
    `NEW_TOKENS` tokens for `PROMPTS` prompts, about a minute on two cores; the papers make 1000.
    """
    layers = evaluator.decoder.shape.num_layers
    process = optimiser(2 * layers, xi=0.01, seed=seed)
    timed = dict[SubLayerPlan, float]()
    for number in range(evaluator.most):
        if number and perf_counter() > evaluator.deadline:
            break
        point = process.suggest()
        mask = SubLayerPlan.of(layers, (int(index) for index, value in point.items() if value >= 0.5))
        if mask not in timed:
            timed[mask] = tokens_per_second(evaluator.decoder, prompts[:PROMPTS], mask)
        process.register(point, timed[mask])
        evaluator.tick()
    for mask in sorted(timed, key=lambda each: -timed[each])[:KEPT]:
        evaluator.rate(mask, "self-sd")
    return len(timed)


def tokens_per_second(decoder: Decoder, prompts: Sequence[list[int]], mask: SubLayerPlan) -> float:
    """Tokens per second of decoding the prompts with drafts of one mask, prefill and first tokens excluded."""
    plan = Plan.masked("Self-SD", mask, DRAFT_LENGTH, STOP)
    done = [generate(Session(decoder), prompt, ConstantPlanner(plan), Limits(NEW_TOKENS)) for prompt in prompts]
    return sum(each.later_tokens for each in done) / sum(each.decode_seconds for each in done)
