"""Made-up latency tables and acceptance profiles with simple laws."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np

from ssd_profiles.acceptance import AcceptanceProfile, Trace
from ssd_profiles.latency import DeviceKey, LatencyTable
from ssd_profiles.light_costs import LightCosts
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.profiling.latency import device_key

DEVICE = DeviceKey("Test Device (R) 2", 2, "2.0", "float32", "packed", 1)


def latency_table(
    num_layers: int, mlp: float = 2e-4, per_token: float = 1e-5, per_context: float = 1e-7
) -> LatencyTable:
    """Attention 0.1 ms + `per_context` a cached token, MLP `mlp`, head 1 ms; each + `per_token` a query token."""
    queries, contexts = np.array([1.0, 2.0, 4.0, 8.0, 16.0, 32.0]), np.array([16.0, 256.0, 2048.0])
    return LatencyTable(
        DEVICE,
        ("full",) * num_layers,
        queries,
        contexts,
        {"full": 1e-4 + per_context * contexts[:, None] + per_token * queries[None]},
        mlp + per_token * queries,
        1e-3 + per_token * queries,
        np.full(queries.shape, 2e-4),
        {"full": np.full((3, 6), 0.1), **dict.fromkeys(("mlp", "head", "step"), np.full(6, 0.1))},
    )


def table_of(decoder: Decoder) -> LatencyTable:
    """A made-up table of a decoder on this device."""
    return replace(latency_table(decoder.shape.num_layers), device=device_key(decoder))


def with_curve(table: LatencyTable, row: float = 1.0, sequence: float = 1e-4) -> LatencyTable:
    """The table with forwards of up to 256 rows, and steps of up to 32 sequences.

    Beyond 32 rows a step grows in proportion to its rows, `row` times as fast; a sequence adds `sequence` seconds.
    """
    wide, sequences = np.array([48.0, 64.0, 96.0, 128.0, 192.0, 256.0]), np.array([2.0, 4.0, 8.0, 16.0, 32.0])
    return replace(
        table,
        wide_queries=wide,
        growth=1.0 + row * (wide / 32 - 1.0),
        sequences=sequences,
        joint=sequence * (sequences - 1.0),
    )


def with_light_costs(table: LatencyTable, saved: float, precisions: tuple[int, ...] = (8,)) -> LatencyTable:
    """The table with copies on which every block, and so a step at 100 tokens, saves this share of its time.

    Each further bits saves half of what is left.
    """
    light = dict[int, LightCosts]()
    for bits in precisions:
        share = np.full(2, 1.0 - saved)
        light[bits] = LightCosts(
            context=100,
            queries=np.array([1.0, 16.0]),
            attention=dict.fromkeys(table.attention, share),
            mlp=share,
            head=share,
            step=share,
        )
        saved = (1.0 + saved) / 2
    return replace(table, light=light)


@cache
def profile(agreement: float, seed: int = 0, tokens: int = 2000) -> AcceptanceProfile:
    """The profile of independent matches."""
    random = np.random.default_rng(seed)
    return AcceptanceProfile.of_traces([Trace(random.random(tokens) < agreement, random.random(tokens))])
