"""Tables of quiet machines obey the law, and those of busy ones break it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd_profiles.arrays import Array
from ssd_profiles.latency import LatencyTable
from ssd_profiles.latency_law import broken_law
from tests.tables import latency_table, with_curve, with_light_costs

REFERENCE = Path(__file__).parents[2] / "artifacts/ssd_artifacts/reference/demo/latency"
TABLE = with_light_costs(with_curve(latency_table(30)), 0.5, (8, 4))


def at(values: Array, index: int | tuple[int, ...], value: float) -> Array:
    """The values with another one at an index."""
    changed = values.copy()
    changed[index] = value
    return changed


@given(
    st.integers(1, 80),
    st.floats(1e-6, 1e-2),
    st.floats(0.0, 1e-4),
    st.floats(0.0, 1e-6),
    st.lists(st.floats(0.95, 1.05), min_size=12, max_size=12),
)
def test_a_quiet_machine_obeys_the_law(
    layers: int, mlp: float, per_token: float, per_context: float, noise: list[float]
) -> None:
    """Whatever its speed; with errors of some percent in every figure, as the best measurements have."""
    table = latency_table(layers, mlp, per_token, per_context)
    assert broken_law(table) is None
    noisy = replace(table, mlp=table.mlp * noise[:6], head=table.head * noise[6:])
    whole = table.overhead + layers * (table.mlp - noisy.mlp) + table.head - noisy.head
    assert broken_law(replace(noisy, overhead=whole)) is None


def test_kernels_that_change_with_the_rows_obey_the_law() -> None:
    """A matmul of 4 rows took 2.3 times as long as one of 3 on a quiet machine, and an int4 one of 5 1.7 times."""
    rows = np.array([1.0, 2.0, 3.0, 4.0, 8.0, 16.0])
    table = replace(latency_table(30), queries=rows)
    for curve in ([25.5, 25.5, 27.0, 62.3, 71.2, 143.0], [5.3, 9.0, 9.5, 9.8, 16.1, 29.6]):
        mlp = np.asarray(curve) * 1e-5
        assert broken_law(replace(table, mlp=mlp)) is None


def test_the_reference_bundles_tables_obey_the_law() -> None:
    paths = sorted(REFERENCE.glob("*.json"))
    assert paths
    for path in paths:
        assert broken_law(LatencyTable.from_json(path.read_text())) is None, path


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda t: replace(t, overhead=t.overhead - 0.98), "a step with 1 row takes -.* ms and its parts"),
        (lambda t: replace(t, overhead=at(t.overhead, 5, -0.3 * t.step_seconds(256, 32))), "a step with 32 rows takes"),
        (lambda t: replace(t, overhead=t.overhead + 1.0), "a step with 1 row takes 10.* ms and its parts"),
        (
            # Made to rise, and with whole steps that agree.
            lambda t: replace(t, mlp=np.array([1.0, 1.0, 1.1, 7.1, 7.1, 7.1]) * 1e-3),
            "an MLP block takes 1.10 ms with 4 rows and 7.10 ms with 8 rows",
        ),
        (lambda t: replace(t, head=at(t.head, 2, 5e-4)), "the head takes 1.02 ms with 2 rows and 0.50 ms with 4 rows"),
        (
            lambda t: replace(t, attention={"full": at(t.attention["full"], 2, 1e-5)}),
            "full attention takes .* with 256 cached tokens and 0.01 ms with 2048 cached tokens",
        ),
        (lambda t: replace(t, growth=t.growth * np.array([1, 1, 9, 9, 9, 9])), "a step takes .* with 96 rows"),
        (lambda t: replace(t, joint=t.joint + 0.98), "a step of 2 sequences takes"),
        (lambda t: replace(t, spread={}), "too few samples of full attention"),
        (lambda t: replace(t, spread=t.spread | {"step": np.full(6, 0.5)}), "whole steps spread by 0.5 to 0.5"),
        (lambda t: replace(t, spread=t.spread | {"mlp": at(np.full(6, 0.1), 3, 1.7)}), "MLP blocks spread by 0.1 to"),
        (
            lambda t: replace(t, light=t.light | {4: replace(t.light[4], step=np.array([0.05, 0.05]))}),
            "in 4 bits a step with 1 row takes",
        ),
    ],
)
def test_what_busy_machines_measure_breaks_the_law(spoil: Callable[[LatencyTable], LatencyTable], says: str) -> None:
    assert broken_law(TABLE) is None
    found = broken_law(LatencyTable.from_json(spoil(TABLE).to_json()))
    assert found is not None
    assert re.search(says, found), found
