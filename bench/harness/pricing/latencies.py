"""Latency tables from files: measured in a quiet minute, they give the same prices on a busy machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ssd_profiles.errors import UserError
from ssd_profiles.latency import LatencyTable
from ssd_runtime.engine.engine import Engine

QUIET = Path("bench/papers/latency/amd-epyc-bb96a4.json")
"""Latencies of SmolLM2's sub-layers, measured in a quiet minute, so that a busy machine gives the same figures."""


def read_latency(path: Path, layers: int) -> LatencyTable:
    """The table in a file, for a model with layers of the same sizes. Raises UserError as `of_layers` does."""
    return of_layers(LatencyTable.from_json(path.read_text(encoding="utf-8")), layers)


def measured_latency(model: str, layers: int) -> LatencyTable:
    """This device's table of a model, for one with layers of the same sizes. Raises UserError as `of_layers` does."""
    return of_layers(Engine.open(model=model).latency, layers)


def of_layers(table: LatencyTable, layers: int) -> LatencyTable:
    """The table for a model of `layers` layers of the same sizes.

    Raises UserError where its layers are of several kinds, because it does not say which kind a new layer has.
    """
    kinds = sorted(set(table.layer_kinds))
    if len(kinds) > 1:
        raise UserError(f"latency table: expected layers of one kind, got {', '.join(kinds)}")
    return replace(table, layer_kinds=table.layer_kinds[:1] * layers)
