"""Requests that share their steps decide together."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd_artifacts.domain_config import LoadValidation
from ssd_profiles.latency import LatencyTable
from ssd_profiles.mask import SubLayerPlan
from ssd_runtime.planning.auto.shared_step import ChainYield, SequenceOptions, SharedSteps, shares
from ssd_runtime.planning.cost import CostModel
from ssd_runtime.planning.frontier import Frontier
from tests.tables import latency_table

LAYERS, CONTEXT = 8, 100
CHEAP, OTHER = SubLayerPlan.of(LAYERS, range(2, 15)), SubLayerPlan.of(LAYERS, range(1, 14))
FLAT = latency_table(LAYERS, per_token=1e-7)
"""Rows that cost nothing."""
STEEP = latency_table(LAYERS, per_token=1e-3)
"""Rows that each cost as much as a plain step's."""


def chains(agreement: float) -> tuple[ChainYield, ...]:
    """Each token is right with this probability."""
    return tuple(
        ChainYield(length, float(length), sum(agreement**place for place in range(length + 1)))
        for length in (1, 2, 4, 8)
    )


def crowd(count: int, **masks: tuple[SubLayerPlan, float]) -> dict[int, SequenceOptions]:
    offered = {mask: chains(agreement) for mask, agreement in masks.values()}
    return {number: SequenceOptions(most_cost=9.0, masks=offered) for number in range(count)}


@pytest.mark.parametrize("count", [2, 4, 16])
def test_a_cheap_accurate_mask_is_drafted_with_by_all(count: int) -> None:
    found = shares(crowd(count, mask=(CHEAP, 0.95)), CostModel(FLAT), CONTEXT, count)
    assert sorted(found) == list(range(count))
    [share] = set(found.values())
    assert share.mask == CHEAP
    assert share.length >= 2
    step = FLAT.step_seconds(CONTEXT, count, CHEAP, count) / FLAT.step_seconds(CONTEXT, count, None, count)
    assert share.step_cost == pytest.approx(step, rel=1e-3), "all that wait draft: each pays the step once"


@pytest.mark.parametrize("count", [2, 4, 16])
@pytest.mark.parametrize(
    ("table", "agreement"), [(STEEP, 0.95), (FLAT, 0.1)], ids=["where rows are dear", "where drafts are wrong"]
)
def test_nobody_drafts_where_that_does_not_gain(count: int, table: LatencyTable, agreement: float) -> None:
    assert shares(crowd(count, mask=(CHEAP, agreement)), CostModel(table), CONTEXT, count) == {}


def test_of_two_masks_that_all_have_the_better_one_is_common() -> None:
    found = shares(crowd(6, one=(OTHER, 0.8), two=(CHEAP, 0.97)), CostModel(FLAT), CONTEXT, 6)
    assert {share.mask for share in found.values()} == {CHEAP}
    assert len(found) == 6


def test_those_without_a_common_mask_draft_with_masks_of_their_own() -> None:
    one, two = crowd(3, one=(CHEAP, 0.97)), crowd(3, two=(OTHER, 0.97))
    members = one | {number + 3: member for number, member in two.items()}
    found = shares(members, CostModel(FLAT), CONTEXT, 6)
    assert {number: share.mask for number, share in found.items()} == {
        number: CHEAP if number < 3 else OTHER for number in range(6)
    }
    costs = CostModel(FLAT)
    for share in found.values():
        step = costs.draft_step(CONTEXT, share.mask, 3) / costs.shared_step(CONTEXT, 6, 6)
        assert share.step_cost == pytest.approx(2 * step), "three pay for the six that wait"


def test_who_cannot_afford_a_failure_takes_no_part() -> None:
    members = crowd(4, mask=(CHEAP, 0.95))
    members[2] = replace(members[2], most_cost=1.0)
    assert sorted(shares(members, CostModel(FLAT), CONTEXT, 4)) == [0, 1, 3]


def test_those_that_wait_are_paid_for() -> None:
    """One of eight has a mask: the other seven would wait for its drafts."""
    alone = shares(crowd(1, mask=(CHEAP, 0.95)), CostModel(FLAT), CONTEXT, 1)
    assert alone
    among = crowd(8) | crowd(1, mask=(CHEAP, 0.95))
    assert shares(among, CostModel(FLAT), CONTEXT, 8) == {}


@given(
    st.integers(2, 8),
    st.lists(st.floats(0.0, 1.0), min_size=2, max_size=2),
    st.floats(1e-8, 3e-4),
    st.floats(1.0, 4.0),
    st.integers(1, 12),
)
def test_a_decision_never_expects_less_than_no_drafts(
    count: int, agreements: list[float], per_token: float, tokens: float, rows: int
) -> None:
    table = latency_table(LAYERS, per_token=per_token)
    costs = CostModel(table)
    members = {
        number: SequenceOptions(
            tokens, rows, 3.0, {CHEAP: chains(agreements[0])} if number % 3 else {OTHER: chains(agreements[1])}
        )
        for number in range(count)
    }
    found = shares(members, costs, CONTEXT, count)
    verified, yielded, drafting = 0.0, 0.0, 0.0
    for number, member in members.items():
        if number in found:
            share = found[number]
            chain = next(each for each in member.masks[share.mask] if each.length == share.length)
            verified, yielded = verified + 1.0 + chain.steps, yielded + chain.tokens
        else:
            verified, yielded = verified + member.rows, yielded + member.tokens
    for mask, length in {(share.mask, share.length) for share in found.values()}:
        together = sum(share.mask == mask for share in found.values())
        drafting += length * costs.draft_step(CONTEXT, mask, together)
    expected = yielded / (drafting + costs.shared_step(CONTEXT, round(verified), count))
    plainly = count * tokens / costs.shared_step(CONTEXT, count * rows, count)
    assert expected >= plainly * (1.0 - 1e-9)


def test_who_comes_first_decides_for_a_step() -> None:
    steps, costs = SharedSteps(), CostModel(FLAT)
    numbers = [steps.join() for _ in range(3)]
    steps.members = {number: crowd(1, mask=(CHEAP, 0.95))[0] for number in numbers}
    steps.decide(7, costs, CONTEXT, 3)
    first = [steps.share(number) for number in numbers]
    assert all(first)
    steps.members = {number: SequenceOptions() for number in numbers}
    steps.decide(7, costs, CONTEXT, 3)
    assert [steps.share(number) for number in numbers] == first
    steps.decide(8, costs, CONTEXT, 3)
    assert not any(steps.share(number) for number in numbers)
    assert [steps.drafted_after(step) for step in (6, 7, 8, None)] == [False, True, False, False]
    steps.leave(numbers[0])
    assert sorted(steps.members) == numbers[1:]


def test_masks_that_were_measured_not_to_pay_at_a_load_are_not_offered_there() -> None:
    measured = [
        LoadValidation(concurrency=count, speedup=speed, speedup_interval=(speed, speed), identical=True)
        for count, speed in ((4, 1.2), (8, 0.9))
    ]
    frontier = Frontier((), under_load=tuple(measured))
    assert [frontier.pays_at(count) for count in (1, 2, 4, 7, 8, 32)] == [True, True, True, True, False, False]
    assert Frontier(()).pays_at(32)
