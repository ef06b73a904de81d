from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd_profiles.latency import LatencyTable
from ssd_profiles.mask import SkipMask
from tests.tables import latency_table


@given(st.floats(0, 5000), st.floats(1, 64), st.sets(st.integers(0, 7)))
def test_a_step_is_the_sum_of_what_it_keeps(context: float, queries: float, skipped: set[int]) -> None:
    table, mask = latency_table(4), SkipMask.of(4, skipped)
    expected = (
        (4 - mask.attention_skipped) * table.attention_seconds(context, queries, "full")
        + (4 - mask.mlp_skipped) * table.mlp_seconds(queries)
        + table.head_seconds(queries)
        + 2e-4
    )
    assert table.step_seconds(context, queries, mask) == pytest.approx(expected)


def test_linear_between_and_beyond_the_grid() -> None:
    table = latency_table(4)
    for context in (50.0, 300.0, 4000.0):
        for n in (1.0, 3.0, 40.0):
            assert table.attention_seconds(context, n, "full") == pytest.approx(
                1e-4 + 1e-7 * context + 1e-5 * n, rel=1e-6
            )


def test_json_round_trip_is_stable() -> None:
    text = latency_table(4).to_json()
    assert LatencyTable.from_json(text).to_json() == text


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"mlp"', '"mpl"'),
        ('"layer_kinds": [', '"layer_kinds": ["sliding",'),
        ('"queries": [\n  1', '"queries": [\n  2'),
        ("[", "{"),
        ('"head": [', '"head": [NaN,'),
    ],
)
def test_damaged_tables_are_refused(old: str, new: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        LatencyTable.from_json(latency_table(4).to_json().replace(old, new, 1))


@pytest.mark.parametrize(
    ("part", "values", "says"),
    [
        ("mlp", [-1e-3] * 6, "mlp.0"),
        ("mlp", [0.0] * 6, "mlp.0"),
        ("head", [1e-300] * 6, "head.0"),
        ("head", [1e300] * 6, "head.0"),
        ("head", [1e-3] * 5, "head: expected shape"),
        ("attention", {"full": [[1e-3] * 6, [1e-3] * 5, [1e-3] * 6]}, "full: expected rows of equal length"),
        ("attention", {}, "one entry for each"),
        ("overhead", [float("nan")] * 6, "overhead.0"),
        ("overhead", [10**400] * 6, "overhead.0"),
        ("spread", {"mlp": [[0.1]]}, "mlp: expected shape"),
        ("queries", [1, 2, 4, 8, 16, 10**400], "queries.5"),
        ("queries", [1, 2, 4, 8, 16, 16], "ascending"),
        ("contexts", list(range(10**6)), "contexts"),
        ("contexts", 16, "contexts"),
        ("layer_kinds", "full", "layer_kinds"),
        ("device", {"device": ["cpu"]}, "device.device"),
    ],
)
def test_impossible_tables_are_refused_in_one_line(part: str, values: object, says: str) -> None:
    data = json.loads(latency_table(4).to_json())
    with pytest.raises(ValueError, match=says) as error:
        LatencyTable.from_json(json.dumps(data | {part: values}))
    assert "\n" not in str(error.value)


def test_deeply_nested_tables_are_refused() -> None:
    with pytest.raises(ValueError, match="recursion limit"):
        LatencyTable.from_json("[" * 100_000)


def test_a_latency_that_falls_goes_on_level_beyond_the_grid() -> None:
    table = latency_table(4)
    table.mlp[-1] = 1e-6
    table.attention["full"][-1] = 1e-6
    assert table.mlp_seconds(10_000) == 1e-6
    assert table.attention_seconds(1e9, 10_000, "full") == 1e-6


def test_a_step_takes_time_however_negative_its_overhead() -> None:
    table = latency_table(4)
    for overhead in (-1e4, -float(table.step_seconds(300) - table.overhead_seconds(1))):
        table.overhead[:] = overhead
        known = LatencyTable.from_json(table.to_json())
        for mask in (None, SkipMask.of(4, range(8))):
            assert all(known.step_seconds(context, n, mask) > 0 for context in (0, 300, 1e6) for n in (1, 32, 1000))


def test_draft_cost_is_a_share() -> None:
    table = latency_table(4)
    costs = [table.draft_cost(SkipMask.of(4, range(n)), 100) for n in range(9)]
    assert costs[0] == pytest.approx(1.0)
    assert np.all(np.diff(costs) < 0)
