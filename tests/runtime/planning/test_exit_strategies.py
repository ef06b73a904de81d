"""SpecBound and DEL: how deep and how far they draft."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ssd_artifacts.domain_config import ExitChoice
from ssd_artifacts.exits import ExitSet
from ssd_runtime.drafting.early_exit import EarlyExit
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.model.exit_heads import ExitHeads
from ssd_runtime.model.runner import ModelRunner
from ssd_runtime.planning.papers.del_exit import DelPlanner
from ssd_runtime.planning.papers.specbound import BoundedExitPlanner
from ssd_runtime.planning.plan import Plan
from ssd_runtime.planning.registry import read_settings
from ssd_runtime.planning.settings import DelSettings
from tests.models import tiny_model

DECODER = Decoder(tiny_model("qwen3", num_hidden_layers=8))


HEADS = ExitHeads(DECODER)


def fitted(*layers: int) -> ExitHeads:
    """Heads with maps behind some layers, which change nothing."""
    hidden = DECODER.shape.hidden
    maps = ExitSet(
        layers, np.stack([np.eye(hidden, dtype=np.float32)] * len(layers)), np.zeros((len(layers), hidden), np.float32)
    )
    return ExitHeads(DECODER, maps)


def exit_plan(heads: ExitHeads, tuned: ExitChoice | None, *assignments: str) -> tuple[Plan, EarlyExit]:
    settings = read_settings("exit", list(assignments))
    planner = BoundedExitPlanner(heads, 8, settings, {"": tuned} if tuned is not None else {}, None)
    planner.start(None, None)  # type: ignore[arg-type]
    plan = planner.plan(10)
    assert isinstance(plan.drafter, EarlyExit)
    return plan, plan.drafter


def test_the_depth_bound_is_the_nearest_exit_that_was_fitted() -> None:
    bounds = {"depth=0.85": (1, 3, 5, 7), "depth=0.625": (1, 3, 5), "depth=0.4": (1, 3), "depth=0": (1,)}
    for depth, stops in bounds.items():
        assert exit_plan(fitted(1, 3, 5, 7), None, depth)[1].stops == stops
    assert exit_plan(fitted(5, 7), None, "depth=0.5")[1].stops == (5,)
    assert exit_plan(HEADS, None)[1].stops[-1] == 2, "10 of 32 layers, of these eight"
    assert exit_plan(HEADS, None, "depth=0.875")[1].stops == (2, 4, 5, 7), "four, the last at the bound"


def test_what_the_bundle_has_tuned_and_what_a_user_sets_reach_the_drafter() -> None:
    tuned = ExitChoice(stops=[3, 5], width=4, threshold=0.4, annealing=0.3, predicted_speedup=1.0)
    plan, drafter = exit_plan(fitted(3, 5), tuned)
    assert (drafter.stops, plan.draft_length, drafter.threshold, drafter.annealing) == ((3, 5), 4, 0.4, 0.3)
    plan, drafter = exit_plan(fitted(3, 5), tuned, "depth=0.4", "width=2", "threshold=0.9", "annealing=0")
    assert (drafter.stops, plan.draft_length, drafter.threshold, drafter.annealing) == ((3,), 2, 0.9, 0.0)
    plan, drafter = exit_plan(HEADS, None)
    assert (plan.draft_length, drafter.threshold, drafter.annealing) == (8, 0.55, 0.2)


def evaluated(planner: DelPlanner, right: set[int]) -> None:
    """Let the planner look at eight tokens, which the exits after these layers have all right and others mostly not."""
    last, other = torch.randn(8, DECODER.shape.hidden), torch.randn(8, DECODER.shape.hidden)
    states = [last if place // 2 in right else other for place in range(16)] + [last]
    planner.observe(SimpleNamespace(tokens=list(range(8))), states)  # type: ignore[arg-type]
    ModelRunner(DECODER).finish(planner.searching(10))


def exit_of(plan: Plan) -> tuple[tuple[int, ...], int]:
    """The layers after which its tokens exit, and its longest draft."""
    assert isinstance(plan.drafter, EarlyExit)
    return plan.drafter.stops, plan.draft_length


@pytest.mark.parametrize("right", [{2}, {4}, {6}, {4, 6}, {2, 4, 6}])
def test_del_drafts_from_the_first_exit_that_is_always_right(right: set[int]) -> None:
    """Tokens a layer are most where each token costs fewest layers, and where drafts are longest (KnapSpec eq. 2)."""
    planner = DelPlanner(HEADS, 8, DelSettings(every=2, max_draft=6))
    evaluated(planner, right)
    assert exit_of(planner.plan(10)) == ((min(right),), 6)


@pytest.mark.parametrize(("memory", "stop"), [(0.0, 6), (1.0, 2)])
def test_del_forgets_what_an_exit_had_right_before(memory: float, stop: int) -> None:
    """Half right, the early exit has more tokens a layer than the late one has."""
    planner = DelPlanner(HEADS, 8, DelSettings(every=2, max_draft=6, memory=memory))
    for right in ({2}, {6}):
        evaluated(planner, right)
    assert exit_of(planner.plan(10))[0] == (stop,)


def test_del_looks_at_exits_once_in_so_many_cycles() -> None:
    planner, wanted = DelPlanner(HEADS, 8, DelSettings(every=2, refresh=4)), list[bool]()
    evaluated(planner, {2})
    for _ in range(8):
        wanted.append(planner.wants_states)
        planner.observe(SimpleNamespace(tokens=[1]), None)  # type: ignore[arg-type]
    assert wanted == [False, False, False, True] * 2


def test_del_leaves_after_layers_that_a_bundle_has_heads_for() -> None:
    planner = DelPlanner(fitted(3, 5), 8, DelSettings(every=2))
    evaluated(planner, {3, 4, 5})
    assert exit_of(planner.plan(10))[0] == (3,)
