"""Prices are the latency table's, whatever the clock says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from bench.harness.contenders import Timed, ours
from bench.harness.pricing import PricedPlanner, priced
from ssd_profiles.mask import SubLayerPlan
from ssd_runtime import Engine, SamplingParams
from ssd_runtime.engine.loop import decoding
from ssd_runtime.engine.output.output import Limits
from ssd_runtime.loading.loaded_model import LoadedModel
from ssd_runtime.model.runner import ModelRunner
from ssd_runtime.planning.plan import ConstantPlanner, Plan
from ssd_runtime.sequence.session import Session
from tests.tables import latency_table

PROMPTS = [[1 + i, 2, 3][: 2 + i % 2] for i in range(3)]
CLASP = "clasp+skip=0.25+refresh=3+confidence=0"
GREEDY = SamplingParams()
NEW = 24


@pytest.fixture(scope="module")
def engine(loaded: LoadedModel) -> Engine:
    made = Engine(loaded)
    made.latency = latency_table(made.decoder.shape.num_layers, per_token=0.0)
    return made


@pytest.fixture(scope="module")
def decoded(engine: Engine) -> Callable[[str], list[Timed]]:
    return lambda name: [priced(engine, name, GREEDY)(ids, NEW) for ids in PROMPTS]


def test_plain_decoding_costs_its_steps(engine: Engine, decoded: Callable[[str], list[Timed]]) -> None:
    for ids, timed in zip(PROMPTS, decoded("plain"), strict=True):
        assert timed.token_ids == ours(engine, "plain", "alone")(ids, NEW).token_ids
        assert timed.counted == len(timed.token_ids) - 1
        steps = (engine.latency.step_seconds(len(ids) + i) for i in range(timed.counted))
        assert timed.seconds == pytest.approx(sum(steps))


def test_searches_are_priced_and_outputs_are_plain_decodings(
    engine: Engine, decoded: Callable[[str], list[Timed]]
) -> None:
    for timed, plain in zip(decoded(CLASP), decoded("plain"), strict=True):
        assert timed.token_ids == plain.token_ids
        # The dynamic programme runs every layer on at least one state.
        assert timed.cycles["plan_seconds"] > engine.latency.step_seconds(2) / 2
        parts = ("plan_seconds", "draft_seconds", "verify_seconds", "plain_seconds")
        assert timed.seconds == pytest.approx(sum(timed.cycles[part] for part in parts))


def watched(engine: Engine, mask: SubLayerPlan) -> PricedPlanner:
    """A planner that has drafted with a mask."""
    planner = PricedPlanner(ConstantPlanner(Plan.masked("x", mask, 3)), engine.latency)
    session = Session(engine.decoder)
    work: Any = planner.watching(decoding(session, session.prefill([7, 8]), planner, Limits(NEW)))
    ModelRunner(engine.decoder).finish(work)
    return planner


def test_drafts_and_verifications_cost_what_the_table_says(engine: Engine) -> None:
    mask = SubLayerPlan.of(engine.decoder.shape.num_layers, {2, 3, 5})
    planner = watched(engine, mask)
    assert len(planner.cycles) > 5
    for cycle in planner.cycles:
        steps = (engine.latency.step_seconds(cycle.context + i, 1, mask) for i in range(cycle.drafted))
        assert cycle.draft_seconds == pytest.approx(sum(steps))
        assert cycle.verify_seconds == pytest.approx(engine.latency.step_seconds(cycle.context, cycle.verified))
