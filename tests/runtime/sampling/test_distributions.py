"""Sampled tokens have the distribution that they should, whatever is drafted."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import chi2
from torch import Tensor

from ssd_profiles.mask import SubLayerPlan
from ssd_runtime.drafting.combined import Extended
from ssd_runtime.drafting.early_exit import EarlyExit
from ssd_runtime.drafting.lookup import Lookup, LookupStats, Node, Ready
from ssd_runtime.drafting.masked import Masked
from ssd_runtime.engine.output.output import Limits
from ssd_runtime.engine.scheduler import Scheduler
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.model.exit_heads import ExitHeads
from ssd_runtime.planning.makers import make_strategy
from ssd_runtime.planning.plan import ConstantPlanner, Cycle, Plan, Planner
from ssd_runtime.planning.registry import read_settings
from ssd_runtime.planning.strategy import MakePlanner, StrategyInputs
from ssd_runtime.sampling.params import SamplingParams
from ssd_runtime.sampling.sampler import Sampler, rejection_sample
from ssd_runtime.sequence.session import Session
from tests.models import tiny_model
from tests.streams import stream_by_the_table
from tests.tables import latency_table
from tests.together import add, finish


def far(counts: np.ndarray, expected: np.ndarray) -> float:
    """p-value of Pearson's χ² for counts under the expected ones; rare outcomes are merged into one."""
    rare = expected < 5.0
    if rare.any():
        counts = np.append(counts[~rare], counts[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
    used = expected > 0.0
    if counts[~used].any():
        return 0.0
    return float(chi2.sf(((counts - expected)[used] ** 2 / expected[used]).sum(), used.sum() - 1))


def some_probs(rows: int, size: int, seed: int) -> Tensor:
    """Distributions, some tokens without any probability."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(rows, size, generator=generator) ** 3
    return (weights * (torch.rand(rows, size, generator=generator) < 0.8)).softmax(-1).where(weights > 0.01, 0.0)


SAMPLES = 200_000


@pytest.mark.parametrize("seed", range(4))
def test_a_judged_token_has_the_targets_distribution(seed: int) -> None:
    probs = some_probs(2, 7, seed)
    target, draft = probs / probs.sum(-1, keepdim=True)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.multinomial(draft, SAMPLES, replacement=True, generator=generator)
    judged = rejection_sample(target.expand(SAMPLES, -1), draft.expand(SAMPLES, -1), drawn, generator)
    counts = torch.bincount(judged, minlength=7).double().numpy()
    assert far(counts, target.double().numpy() * SAMPLES) > 1e-4
    stood = float((judged == drawn).double().mean())
    assert stood == pytest.approx(float(torch.minimum(target, draft).sum()), abs=0.01), "1 - total variation"


def test_a_token_that_no_rounding_makes_possible_is_never_drawn() -> None:
    """A rejected token is replaced by one of the target's where rounding leaves no excess over the draft."""
    generator, target = torch.Generator().manual_seed(0), torch.tensor([[0.0, 0.25, 0.25, 0.0]])
    drawn = {int(rejection_sample(target, 2 * target, torch.tensor([1]), generator)) for _ in range(200)}
    assert drawn == {1, 2}


@pytest.mark.parametrize(
    "sampling",
    [SamplingParams(1.0), SamplingParams(0.7, top_k=5), SamplingParams(1.3, top_p=0.8), SamplingParams(1.0, min_p=0.1)],
)
def test_a_choice_has_the_processed_distribution(sampling: SamplingParams) -> None:
    """Place after place of one sequence, each with noise of its own."""
    logits, sampler = torch.randn(1, 9, generator=torch.Generator().manual_seed(3)), Sampler(sampling)
    expected = sampler._processed(logits[0], [], [])[1].softmax(-1).double().numpy()
    counts, rows = np.zeros(9), 250
    for start in range(0, 8_000, rows):
        choose = sampler.choose(
            logits.expand(rows, -1),
            range(start),
            lambda: [[0] * row for row in range(rows)],  # type: ignore[arg-type]
        )
        counts += np.bincount([choose(row) for row in range(rows)], minlength=9)
    assert far(counts, expected * counts.sum()) > 1e-4


SMALL = 4
"""Words of the model that whole outputs are enumerated of."""
TINY = Decoder(tiny_model("llama", seed=9, vocab_size=SMALL, num_hidden_layers=2), weight_memory=0)
TINY_MASK = SubLayerPlan.of(2, {1, 2})
TINY_PLANS: dict[str, Plan] = {
    "plain": Plan("plain"),
    "chain": Plan.masked("test", TINY_MASK, 2),
    "tree": Plan.masked("test", TINY_MASK, 2, branching=((1.0, 3),)),
    "exit": Plan("test", EarlyExit(ExitHeads(TINY), (1,), 0.3), 2),
}
PROMPT = [1, 3, 2]
GUESSES = (Node(2, 0, 0.5, 1), Node(1, 1, 0.3, 2), Node(3, 0, 0.2, 1))


def known_words() -> Lookup:
    lookup = Lookup(LookupStats())
    lookup.start(PROMPT * 3)
    return lookup


TINY_PLANS |= {
    "guesses": Plan("test", Ready(GUESSES), 2),
    "guesses behind a chain": Plan(
        "test", Extended(Masked(TINY_MASK), 1, known_words(), 1.0, 1.0, (1.0,) * 32, 9.0), 2
    ),
    "second candidates beside a chain": Plan(
        "test", Extended(Masked(TINY_MASK, 0.0, ((1.0, 2),)), 2, known_words(), 0.8, 1.0, (1.0,) * 32, 9.0), 2
    ),
}
RUNS = int(os.environ.get("SSD_SAMPLES", "700"))
"""Samples per plan. Raise it by the environment after a change of how tokens are chosen."""
SHARP = SamplingParams(1.4, top_k=3, repetition_penalty=0.6, rejection=True)


def joint(sampling: SamplingParams) -> np.ndarray:
    """Probability of every first three tokens, by the full model's own logits [SMALL ** 3]."""
    sampler, found = Sampler(sampling), np.ones((SMALL,) * 3)
    with torch.inference_mode():
        for place in range(3):
            for before in itertools.product(range(SMALL), repeat=place):
                ids = [*PROMPT, *before]
                [logits] = TINY.head(Session(TINY).prefill(ids).last[None])
                probs = sampler._processed(logits, ids, [])[1].softmax(-1).double().numpy()
                found[before] *= probs.reshape(-1, *(1,) * (2 - place))
    return found.reshape(-1)


def sampled(make_planner: MakePlanner, sampling: SamplingParams, ends: Iterable[int] = ()) -> np.ndarray:
    """Count the first three tokens of each of `RUNS` outputs, seed after seed; zeros follow one of `ends`.

    Every other time the answer goes on, so that drafts have room; else the third token stands behind all drafts.
    """
    counts, scheduler = np.zeros((SMALL,) * 3), Scheduler(TINY, 32)
    jobs = [
        add(
            scheduler, PROMPT, Limits(3 + 2 * (seed % 2), frozenset(ends)), make_planner(), replace(sampling, seed=seed)
        )
        for seed in range(RUNS)
    ]
    finish(scheduler)
    for job in jobs:
        counts[tuple([*job.ended().token_ids, 0, 0][:3])] += 1
    return counts.reshape(-1)


def of_plan(name: str) -> MakePlanner:
    return lambda: ConstantPlanner(TINY_PLANS[name])


@pytest.mark.statistics
@pytest.mark.parametrize("name", sorted(TINY_PLANS))
def test_the_first_three_tokens_have_the_targets_joint_distribution(name: str) -> None:
    counts, expected = sampled(of_plan(name), SHARP), joint(SHARP)
    assert far(counts, expected * RUNS) > 1e-4
    assert np.abs(counts / RUNS - expected).sum() / 2 < 2.8 / RUNS**0.5, "total variation"


@pytest.mark.statistics
@pytest.mark.parametrize("name", sorted(TINY_PLANS))
def test_a_token_that_ends_answers_keeps_its_probability(name: str) -> None:
    sampling = SamplingParams(1.4, rejection=True)
    expected = joint(sampling).reshape((SMALL,) * 3)
    for rest in (expected[0], *expected[:, 0]):
        rest.flat[0] = rest.sum()
        rest.flat[1:] = 0.0
    assert far(sampled(of_plan(name), sampling, ends=[0]), expected.reshape(-1) * RUNS) > 1e-4


@pytest.mark.statistics
@pytest.mark.parametrize("name", ["auto", "clasp"])
def test_so_they_have_whatever_a_strategy_plans(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream has learned from other seeds.

    Strategies with a bundle's masks draft as the plans above do; the others draft nothing in so few tokens.
    """
    drafts = 0
    # A step of so small a model takes less than planning it: `auto` would leave most of them unplanned.
    monkeypatch.setattr("ssd_runtime.planning.auto.auto.Stream", stream_by_the_table)

    def make() -> Planner:
        planner = planners()
        observe = planner.observe

        def count(cycle: Cycle, states: list[Tensor] | None) -> None:
            nonlocal drafts
            drafts += cycle.drafted
            observe(cycle, states)

        planner.observe = count  # type: ignore[method-assign]
        return planner

    planners = make_strategy(
        StrategyInputs(name=name, settings=read_settings(name, []), decoder=TINY, bundle=None, latency=latency_table(2))
    )
    counts, expected = sampled(make, SHARP), joint(SHARP)
    assert far(counts, expected * RUNS) > 1e-4
    assert np.abs(counts / RUNS - expected).sum() / 2 < 2.8 / RUNS**0.5, "total variation"
    assert drafts > RUNS / 4


@pytest.mark.statistics
def test_with_the_targets_noise_it_does_too() -> None:
    """Sample plain decoding, whose output every plan reproduces."""
    coupled = replace(SHARP, rejection=False)
    assert far(sampled(of_plan("plain"), coupled), joint(coupled) * RUNS) > 1e-4
