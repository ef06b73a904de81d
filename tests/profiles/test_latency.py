from __future__ import annotations

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


def test_negative_latencies_are_refused() -> None:
    table = latency_table(4)
    table.mlp[0] = -1e-3
    with pytest.raises(ValueError, match="negative"):
        LatencyTable.from_json(table.to_json())


def test_draft_cost_is_a_share() -> None:
    table = latency_table(4)
    costs = [table.draft_cost(SkipMask.of(4, range(n)), 100) for n in range(9)]
    assert costs[0] == pytest.approx(1.0)
    assert np.all(np.diff(costs) < 0)
