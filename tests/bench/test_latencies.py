"""A latency table serves models of other depths, as long as their layers have the same sizes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench.harness.pricing.latencies import of_layers, read_latency
from ssd_profiles.errors import UserError
from tests.tables import latency_table

TABLE = latency_table(4)


def test_a_deeper_model_costs_its_layers_more() -> None:
    one, two = (of_layers(TABLE, layers).step_seconds(64) for layers in (4, 10))
    assert one == TABLE.step_seconds(64)
    assert two - one == pytest.approx(6 * sum(TABLE.sublayer_seconds(64, 1)[:2]))


def test_a_table_in_a_file_is_the_same_again(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text(TABLE.to_json())
    assert read_latency(path, 4).step_seconds(64, 3) == pytest.approx(TABLE.step_seconds(64, 3), rel=1e-4)


def test_layers_of_several_kinds_are_refused() -> None:
    mixed = replace(TABLE, layer_kinds=("full", "window", "full", "window"))
    with pytest.raises(UserError, match="expected layers of one kind, got full, window"):
        of_layers(mixed, 8)
