"""Prices are the latency table's, and decoding several prompts together changes neither outputs nor prices."""

from __future__ import annotations

import pytest

from bench.harness.contenders import Timed
from bench.harness.pricing.lockstep import run_together
from bench.harness.pricing.priced import PricedPlanner, priced, priced_stream
from ssd_profiles.errors import UserError
from ssd_profiles.mask import SkipMask
from ssd_runtime.engine.loop import decoding, generate
from ssd_runtime.engine.output.output import Limits
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.model.runner import Work
from ssd_runtime.planning.papers.clasp import ClaspPlanner
from ssd_runtime.planning.plan import ConstantPlanner, PlainPlanner, Plan
from ssd_runtime.planning.settings import ClaspSettings
from ssd_runtime.planning.strategy import MakePlanner
from ssd_runtime.sequence.session import Session
from tests.models import tiny_model
from tests.tables import latency_table

DECODER = Decoder(tiny_model("llama", seed=6, max_position_embeddings=256))
LAYERS = DECODER.shape.num_layers
TABLE = latency_table(LAYERS, per_token=0.0)
PROMPTS = [[1 + i, 2, 3][: 2 + i % 2] for i in range(5)]
MASK = SkipMask.of(LAYERS, {2, 3, 5})
LIMITS = Limits(24)


def decoded(make: MakePlanner, together: bool = True) -> list[Timed]:
    groups = [PROMPTS] if together else [[ids] for ids in PROMPTS]
    return [timed for group in groups for timed in run_together(DECODER, [work(ids, make) for ids in group])]


def work(ids: list[int], make: MakePlanner) -> Work[Timed]:
    session = Session(DECODER)
    prompt = session.prefill(ids)
    return priced(session, prompt, make, TABLE, LIMITS)


def test_plain_decoding_costs_its_steps() -> None:
    for ids, timed in zip(PROMPTS, decoded(PlainPlanner), strict=True):
        assert timed.token_ids == generate(Session(DECODER), ids, PlainPlanner(), LIMITS).token_ids
        assert timed.counted == len(timed.token_ids) - 1
        assert timed.seconds == pytest.approx(sum(TABLE.step_seconds(len(ids) + i) for i in range(timed.counted)))


def test_drafts_and_verifications_cost_what_the_table_says() -> None:
    planner = PricedPlanner(ConstantPlanner(Plan.masked("x", MASK, 3)), TABLE)
    session = Session(DECODER)
    prompt = session.prefill([7, 8])
    run_together(DECODER, [planner.watching(decoding(session, prompt, planner, LIMITS))])
    assert len(planner.cycles) > 5
    for cycle in planner.cycles:
        steps = (TABLE.step_seconds(cycle.context + i, 1, MASK) for i in range(cycle.drafted))
        assert cycle.draft_seconds == pytest.approx(sum(steps))
        assert cycle.verify_seconds == pytest.approx(TABLE.step_seconds(cycle.context, cycle.verified))


@pytest.mark.parametrize(
    "make",
    [
        lambda: ConstantPlanner(Plan.masked("x", MASK, 4)),
        lambda: ClaspPlanner(ClaspSettings(skip=0.25, refresh=3, confidence=0.0)),
    ],
)
def test_together_is_the_same_as_alone(make: MakePlanner) -> None:
    together, alone = decoded(make), decoded(make, together=False)
    plain = decoded(PlainPlanner)
    for one, other, reference in zip(together, alone, plain, strict=True):
        assert one.token_ids == other.token_ids == reference.token_ids
        assert one.seconds == pytest.approx(other.seconds)
        assert one.cycles == pytest.approx(other.cycles)
    for ids, one in zip(PROMPTS, together, strict=True):
        whole = generate(Session(DECODER), ids, make(), LIMITS)
        assert one.cycles["accepted"] == sum(cycle.accepted for cycle in whole.cycles if cycle.drafted)
        assert one.cycles["drafted"] == sum(cycle.drafted for cycle in whole.cycles)


def test_a_session_that_another_contender_has_used_is_as_good_as_new() -> None:
    makes: list[MakePlanner] = [
        lambda: ClaspPlanner(ClaspSettings(skip=0.25, refresh=3, confidence=0.0)),
        lambda: ConstantPlanner(Plan.masked("x", MASK, 4)),
        PlainPlanner,
    ]
    session = Session(DECODER)
    prompt = session.prefill(PROMPTS[0])
    for make in makes:
        [used] = run_together(DECODER, [priced(session, prompt, make, TABLE, LIMITS)])
        [fresh] = run_together(DECODER, [work(PROMPTS[0], make)])
        assert used.token_ids == fresh.token_ids
        assert used.seconds == pytest.approx(fresh.seconds)


def test_searches_are_priced() -> None:
    searching = decoded(lambda: ClaspPlanner(ClaspSettings(skip=0.25, refresh=3, confidence=0.0)))
    for timed in searching:
        # The dynamic programme runs every layer on at least one state.
        assert timed.cycles["plan_seconds"] > TABLE.step_seconds(2) / 2
        parts = ("plan_seconds", "draft_seconds", "verify_seconds", "plain_seconds")
        assert timed.seconds == pytest.approx(sum(timed.cycles[part] for part in parts))


def test_streams_side_by_side_are_the_same_as_alone() -> None:
    makes: list[MakePlanner] = [
        lambda: ClaspPlanner(ClaspSettings(skip=0.25, refresh=3, confidence=0.0)),
        lambda: ConstantPlanner(Plan.masked("x", MASK, 4)),
    ]
    works = [priced_stream(DECODER, PROMPTS, make, TABLE, LIMITS) for make in makes]
    for make, stream in zip(makes, run_together(DECODER, works), strict=True):
        alone = decoded(make, together=False)
        assert [one.token_ids for one in stream] == [one.token_ids for one in alone]
        assert [one.seconds for one in stream] == pytest.approx([one.seconds for one in alone])


def test_sub_layers_on_lighter_copies_have_no_price() -> None:
    lighter = SkipMask(MASK.bits, (8,) * (len(MASK.bits) + 1))
    with pytest.raises(UserError, match="--draft-bits none"):
        run_together(DECODER, [work(PROMPTS[0], lambda: ConstantPlanner(Plan.masked("x", lighter, 4)))])
