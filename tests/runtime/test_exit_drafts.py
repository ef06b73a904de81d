"""Early exits as a source of `auto`: what they promise, what they cost, when they are left."""

from __future__ import annotations

import pytest

from ssd_artifacts.domain_config import ExitChoice
from ssd_runtime.planning.auto.draft_stats import DraftStats
from ssd_runtime.planning.auto.exit_drafts import ExitDrafts
from ssd_runtime.planning.cost import CostModel
from ssd_runtime.planning.plan import Cycle
from tests.tables import latency_table

LAYERS, CONTEXT = 8, 100
TABLE = latency_table(LAYERS)
COSTS = CostModel(TABLE).rows(CONTEXT)
PLAIN = 0.03
"""Seconds of a plain step on this machine."""


def drafts(stop: int = 4, width: int = 4, promised: float = 1.5) -> ExitDrafts:
    choice = ExitChoice(stops=[stop], width=width, threshold=0.5, annealing=0.0, predicted_speedup=promised)
    return ExitDrafts(None, choice, TABLE, DraftStats())  # type: ignore[arg-type]


def cycle(source: ExitDrafts, accepted: int, slowness: float = 1.0) -> Cycle | None:
    """The cycle of the next proposal, of whose drafts `accepted` stand, in `slowness` times the table's seconds."""
    proposal = source.propose(CONTEXT, COSTS, 9.0)
    if proposal is None or proposal.plan is None:
        return None
    length = proposal.plan.draft_length
    tokens = [0] * (min(accepted, length) + 1)
    seconds = source._cost(CONTEXT, length, COSTS) * slowness * PLAIN
    return Cycle(proposal.plan, CONTEXT, length, len(tokens) - 1, tokens, length + 1, seconds, 0.0, length, 0.0, True)


@pytest.mark.parametrize("stop", range(1, LAYERS))
@pytest.mark.parametrize("length", [1, 2, 4])
def test_a_cycle_costs_its_prefixes_its_looks_and_the_rest_of_the_verification(stop: int, length: int) -> None:
    plain, rows = TABLE.step_seconds(CONTEXT), TABLE.step_seconds(CONTEXT, length + 1)
    one, several = (sum(TABLE.sublayer_seconds(CONTEXT, n)[: 2 * stop]) for n in (1, length + 1))
    overhead = plain - sum(TABLE.sublayer_seconds(CONTEXT, 1)) - TABLE.head_seconds(1)
    expected = (length + 1) * (one + TABLE.head_seconds(1) + overhead) + rows - several
    assert drafts(stop)._cost(CONTEXT, length, COSTS) == pytest.approx(expected / plain)


def test_no_more_is_offered_than_the_budget_covers_and_a_short_draft_promises_less() -> None:
    source = drafts()
    proposals = [source.propose(CONTEXT, COSTS, most) for most in (9.0, 2.0, 1.0)]
    plans = [proposal.plan for proposal in proposals if proposal is not None]
    assert [plan.draft_length if plan is not None else 0 for plan in plans] == [4, 1, 0]
    assert [proposal.speedup for proposal in proposals if proposal is not None] == pytest.approx([1.5, 1.125, 0.0])
    assert {proposal.best for proposal in proposals if proposal is not None} == {1.5}


def test_exits_that_hold_are_kept_and_those_that_fail_left_until_they_were_forgotten() -> None:
    good, bad = drafts(stop=2), drafts(stop=2)
    for _ in range(40):
        done = cycle(good, 4)
        assert done is not None
        good.observe(done, COSTS, PLAIN)
    failures = 0
    while (done := cycle(bad, 0)) is not None:
        bad.observe(done, COSTS, PLAIN)
        failures += 1
        assert failures < 15
    assert failures
    bad.stats.decay(3000)
    assert cycle(bad, 0) is not None


def test_exits_that_take_longer_than_the_table_says_are_left() -> None:
    fast, slow = drafts(stop=2), drafts(stop=2)
    for _ in range(60):
        for source, slowness in ((fast, 1.0), (slow, 1.8)):
            if (done := cycle(source, 4, slowness)) is not None:
                source.observe(done, COSTS, PLAIN)
    assert fast.stats.trusted
    assert not slow.stats.trusted
