"""The controller finds the true cost of rows in measured times, whatever the machine's pace."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd_runtime.planning.auto.verify_stats import VerifyStats

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
    assert record.plain_seconds == pytest.approx(0.04)


@given(st.lists(st.tuples(st.integers(1, 40), st.floats(0.0, 10.0)), max_size=50))
def test_more_rows_never_cost_less_and_one_costs_one(seen: list[tuple[int, float]]) -> None:
    record = VerifyStats()
    for rows, seconds in seen:
        record.update(rows, seconds, TABLE[min(rows, 32) - 1])
    priced = record.priced(TABLE)
    assert priced[0] == TABLE[0]
    assert all(a <= b for a, b in pairwise(priced))
