"""Requests that share their steps decide together, by costs that are found in measured times."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd_artifacts.domain_config import LoadValidation
from ssd_profiles.latency import LatencyTable
from ssd_profiles.mask import SubLayerPlan
from ssd_runtime.planning.auto.draft_stats import MIN_GAIN
from ssd_runtime.planning.auto.shared_step import IDLE_STEPS, ChainYield, SequenceOptions, SharedSteps, shares
from ssd_runtime.planning.auto.verify_stats import VerifyStats
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


def test_who_cannot_afford_a_failure_takes_no_part() -> None:
    """All four wait for its rows and for its draft steps."""
    costs, members = CostModel(latency_table(LAYERS, per_token=1e-5)), crowd(4, mask=(CHEAP, 0.95))
    share = shares(members, costs, CONTEXT, 4)[2]
    added = costs.shared_step(CONTEXT, 4 + share.length, 4) / costs.shared_step(CONTEXT, 4, 4) - 1.0
    failed = 1.0 + 4 * added + share.length * share.step_cost
    for most_cost in (failed + 1e-6, failed - 1e-6):
        members[2] = replace(members[2], most_cost=most_cost)
        assert (shares(members, costs, CONTEXT, 4).get(2) == share) is (most_cost > failed)
    members[2] = replace(members[2], most_cost=1.0)
    assert sorted(shares(members, costs, CONTEXT, 4)) == [0, 1, 3]


@given(
    st.integers(2, 8),
    st.integers(0, 4),
    st.lists(st.floats(0.0, 1.0), min_size=2, max_size=2),
    st.floats(1e-8, 3e-4),
    st.floats(1.0, 4.0),
    st.integers(1, 12),
)
def test_a_decision_never_expects_less_than_no_drafts(
    count: int, others: int, agreements: list[float], per_token: float, tokens: float, rows: int
) -> None:
    """Sequences that are no members of the stream decode plainly in the same steps."""
    table = latency_table(LAYERS, per_token=per_token)
    costs, every = CostModel(table), count + others
    members = {
        number: SequenceOptions(
            tokens, rows, 3.0, {CHEAP: chains(agreements[0])} if number % 3 else {OTHER: chains(agreements[1])}
        )
        for number in range(count)
    }
    found = shares(members, costs, CONTEXT, every)
    plain = costs.shared_step(CONTEXT, every, every)
    verified, yielded, drafting = float(others), float(others), 0.0
    for number, member in members.items():
        if number in found:
            share = found[number]
            chain = next(each for each in member.masks[share.mask] if each.length == share.length)
            verified, yielded = verified + 1.0 + chain.steps, yielded + chain.tokens
            added = costs.shared_step(CONTEXT, every + share.length, every) / plain
            failed = 1.0 + every * (added - 1.0) + share.length * share.step_cost
            assert failed <= member.most_cost + 1e-9, "its budget covers that all drafts are wrong"
        else:
            verified, yielded = verified + member.rows, yielded + member.tokens
    for mask, length, charged in {(share.mask, share.length, share.step_cost) for share in found.values()}:
        together = sum(share.mask == mask for share in found.values())
        drafting += length * costs.draft_step(CONTEXT, mask, together)
        waiting = every * costs.draft_step(CONTEXT, mask, together) / plain
        assert together * charged == pytest.approx(waiting), "those that draft pay for all that wait"
    expected = yielded / (drafting + costs.shared_step(CONTEXT, round(verified), every))
    plainly = (others + count * tokens) / costs.shared_step(CONTEXT, others + count * rows, every)
    assert expected >= plainly * (MIN_GAIN if found else 1.0) * (1.0 - 1e-9)


def test_sequences_that_are_no_members_count_with_a_row_and_a_token() -> None:
    """Beside eight of them, whom a draft step holds up too, a draft of one is worth less than alone."""
    members = {0: replace(crowd(1, mask=(CHEAP, 1.0))[0], most_cost=99.0)}
    assert shares(members, CostModel(FLAT), CONTEXT, 2)
    assert not shares(members, CostModel(FLAT), CONTEXT, 9)


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


def test_the_latest_two_steps_are_known_to_have_waited_for_drafts() -> None:
    steps = SharedSteps(members=crowd(2, mask=(CHEAP, 0.95)))
    for step in (5, 6, 7):
        steps.decide(step, CostModel(FLAT), CONTEXT, 2)
    assert [steps.drafted_after(step) for step in (5, 6, 7)] == [False, True, True]


def test_after_a_decision_for_no_drafts_the_next_one_waits() -> None:
    """All sequences wait for a decision; but one that has not named its masks yet is asked at once."""
    steps, costs = SharedSteps(), CostModel(FLAT)
    numbers = [steps.join(), steps.join()]
    assert steps.worth_deciding(7)
    steps.decide(7, costs, CONTEXT, 2)
    assert steps.worth_deciding(8)
    steps.members = {number: SequenceOptions(asked=True) for number in numbers}
    found = [steps.worth_deciding(step) for step in (6, 7, 8, 6 + IDLE_STEPS, 7 + IDLE_STEPS)]
    assert found == [True, True, False, False, True]
    steps.members = crowd(2, mask=(CHEAP, 0.95))
    steps.decide(20, costs, CONTEXT, 2)
    assert steps.worth_deciding(21), "drafts go on"


def test_masks_that_were_measured_not_to_pay_at_a_load_are_not_offered_there() -> None:
    measured = [
        LoadValidation(concurrency=count, speedup=speed, speedup_interval=(speed, speed), identical=True)
        for count, speed in ((2, 0.9), (4, 1.2), (8, 0.9))
    ]
    frontier = Frontier((), under_load=tuple(measured))
    assert [frontier.pays_at(count) for count in (1, 2, 4, 7, 8, 32)] == [True, False, True, True, False, False]
    assert Frontier(()).pays_at(32)


TABLE = [1.0 + 0.05 * rows for rows in range(32)]


def true_cost(rows: int) -> float:
    """Seconds on a machine of which the table is wrong: trees of 6 to 12 rows cost a third more, all others a tenth."""
    return TABLE[rows - 1] * (1.0 if rows == 1 else 1.33 if 6 <= rows <= 12 else 1.1)


def run(record: VerifyStats, seed: int, cycles: int = 1500, noise: float = 0.06, scale: float = 1.0) -> None:
    draws, rows = random.Random(seed), 1
    for cycle in range(cycles):
        # Runs of the same kind, as text has them; a machine whose pace drifts, and now and then something beside it.
        rows = rows if draws.random() < 0.6 else draws.choice([1, 2, 4, 8, 12])
        pace = 0.04 * (1.0 + 0.3 * math.sin(cycle / 200)) * scale
        held_up = 3.0 if draws.random() < 0.02 else 1.0
        record.update(rows, pace * true_cost(rows) * math.exp(draws.gauss(0.0, noise)) * held_up, TABLE[rows - 1])


@pytest.mark.parametrize("seed", range(5))
def test_costs_come_near_the_truth_through_noise_drift_and_interruptions(seed: int) -> None:
    record = VerifyStats()
    run(record, seed)
    priced = record.priced(TABLE)
    for rows in (1, 2, 4, 8, 12):
        assert priced[rows - 1] == pytest.approx(true_cost(rows), rel=0.07)


@given(st.floats(0.01, 100.0), st.integers(0, 99))
def test_a_machine_that_is_slower_as_a_whole_changes_nothing(scale: float, seed: int) -> None:
    one, other = VerifyStats(), VerifyStats()
    run(one, seed, 60)
    run(other, seed, 60, scale=scale)
    assert other.priced(TABLE) == pytest.approx(one.priced(TABLE), rel=1e-9)


@pytest.mark.parametrize("held_up", range(3))
def test_a_held_up_step_at_the_start_says_nothing_of_the_pace(held_up: int) -> None:
    record = VerifyStats()
    for step in range(3):
        assert not record.settled
        record.update(1, 0.5 if step == held_up else 0.04, 1.0)
    assert record.settled
    assert record.pace == pytest.approx(0.04)


def test_steps_with_rows_of_prompts_price_no_guess() -> None:
    record = VerifyStats()
    for _ in range(50):
        record.update(1, 0.04, 1.0)
        record.update(130, 0.4, 5.0)
    assert record.priced(TABLE) == pytest.approx(TABLE)
    assert record.pace == pytest.approx(0.04)
    crowded = VerifyStats()
    for _ in range(3):
        crowded.update(130, 0.4, 5.0)
    assert crowded.settled


@given(st.lists(st.tuples(st.integers(1, 70), st.floats(0.0, 10.0)), max_size=50))
def test_more_rows_never_cost_less_and_one_costs_one(seen: list[tuple[int, float]]) -> None:
    record = VerifyStats()
    for rows, seconds in seen:
        record.update(rows, seconds, TABLE[min(rows, 32) - 1])
    priced = record.priced(TABLE)
    assert priced[0] == TABLE[0]
    assert all(a <= b for a, b in pairwise(priced))
