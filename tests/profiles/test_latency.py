from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd_profiles.latency import LatencyTable
from ssd_profiles.mask import SubLayerPlan
from tests.tables import latency_table, with_curve, with_light_costs


@given(st.floats(0, 5000), st.floats(1, 64), st.sets(st.integers(0, 7)))
def test_a_step_is_the_sum_of_what_it_keeps(context: float, queries: float, skipped: set[int]) -> None:
    table, mask = latency_table(4), SubLayerPlan.of(4, skipped)
    expected = (
        (4 - mask.mixers_skipped) * table.mixer_seconds(context, queries, "full")
        + (4 - mask.mlps_skipped) * table.mlp_seconds(queries)
        + table.head_seconds(queries)
        + 2e-4
    )
    assert table.step_seconds(context, queries, mask) == pytest.approx(expected)


LIT = replace(with_light_costs(latency_table(4), 0.5, (8, 4)), draft_head=0.3)


@given(
    st.floats(0, 5000), st.floats(1, 32), st.sets(st.integers(0, 7)), st.lists(st.sampled_from([0, 4, 8]), min_size=9)
)
def test_a_step_has_each_sublayers_own_precision(
    context: float, queries: float, skipped: set[int], precisions: list[int]
) -> None:
    """Changing one sub-layer's bits changes the step by what the blocks differ, and by its part of the overhead."""
    mask = SubLayerPlan.of(4, skipped).lightened(dict(enumerate(precisions[:9])))
    kept = [index for index in range(8) if index not in skipped]
    blocks = sum(LIT.sublayer_seconds(context, queries, mask.bits_of(index))[index] for index in kept)
    overheads = [LIT.overhead_seconds(queries, mask.bits_of(index)) for index in kept] or [
        LIT.overhead_seconds(queries)
    ]
    expected = blocks + LIT.draft_head_seconds(queries, mask.head_bits) + np.mean(overheads)
    assert LIT.step_seconds(context, queries, mask) == pytest.approx(expected)
    saved = 0.7 * LIT.head_seconds(queries)
    in_full = latency_table(4).step_seconds(context, queries, SubLayerPlan(mask.skipped))
    assert LIT.step_seconds(context, queries, SubLayerPlan(mask.skipped)) == pytest.approx(in_full - saved)
    assert LIT.draft_head_seconds(queries, 8) == LIT.head_seconds(queries, 8)


@given(st.floats(0, 5000), st.floats(1, 32), st.sampled_from([8, 4]))
def test_light_weights_save_the_same_seconds_of_attention_at_every_context(
    context: float, queries: float, bits: int
) -> None:
    """They read the same keys; costs were measured after 100 tokens, where the share is known."""
    measured = LIT.mixer_seconds(100, queries, "full")
    saved = measured * (1.0 - LIT.light[bits].share("full", queries))
    full = LIT.mixer_seconds(context, queries, "full")
    assert LIT.mixer_seconds(context, queries, "full", bits) == pytest.approx(max(0.01 * full, full - saved))


@given(st.floats(1, 32), st.sampled_from([8, 4]))
def test_a_whole_light_step_takes_the_share_that_was_measured(queries: float, bits: int) -> None:
    step = LIT.step_seconds(100, queries, SubLayerPlan.of(4).lightened(bits))
    assert step == pytest.approx(LIT.light[bits].share("step", queries) * LIT.step_seconds(100, queries))


def test_costs_of_lighter_copies_travel_and_are_checked() -> None:
    text = LIT.to_json()
    assert LatencyTable.from_json(text).to_json() == text
    assert "light" not in json.loads(latency_table(4).to_json())
    for spoil in (
        lambda light: light["8"].update(queries=[1, 1]),
        lambda light: light["8"].update(queries=[2, 16]),
        lambda light: light["8"].update(mlp=[0.5]),
        lambda light: light["8"].update(step=[0.0, 0.5]),
        lambda light: light["8"].update(attention={"other": [0.5, 0.5]}),
        lambda light: light.update({"5": light["8"]}),
    ):
        data = json.loads(text)
        spoil(data["light"])
        with pytest.raises(ValueError, match="light"):
            LatencyTable.from_json(json.dumps(data))


@pytest.mark.parametrize("unit", [1e-9, 1e-5, 1.0, 1e3])
def test_figures_keep_six_digits_however_short_they_are(unit: float) -> None:
    table = latency_table(4)
    known = LatencyTable.from_json(replace(table, mlp=unit * np.linspace(1.0, 2.0, 6) ** 0.5).to_json())
    assert known.mlp == pytest.approx(unit * np.linspace(1.0, 2.0, 6) ** 0.5, rel=1e-5)


def test_linear_between_and_beyond_the_grid() -> None:
    table = latency_table(4)
    for context in (50.0, 300.0, 4000.0):
        for n in (1.0, 3.0, 40.0):
            assert table.mixer_seconds(context, n, "full") == pytest.approx(1e-4 + 1e-7 * context + 1e-5 * n, rel=1e-6)


@given(
    st.floats(0, 5000),
    st.lists(st.floats(1, 600), min_size=2, max_size=2),
    st.lists(st.floats(1, 60), min_size=2, max_size=2),
    st.sets(st.integers(0, 7)),
    st.floats(0.0, 3.0),
)
def test_more_rows_or_sequences_never_take_less(
    context: float, rows: list[float], sequences: list[float], skipped: set[int], row: float
) -> None:
    table, mask = with_curve(latency_table(4), row), SubLayerPlan.of(4, skipped)
    few, many = sorted(rows)
    alone, together = sorted(sequences)
    less = table.step_seconds(context, few, mask, alone)
    assert less <= table.step_seconds(context, many, mask, alone) * (1 + 1e-12)
    assert less <= table.step_seconds(context, few, mask, together) * (1 + 1e-12)
    assert less <= table.step_seconds(context, few, None, alone) * (1 + 1e-12)


def test_beyond_the_grid_a_step_grows_as_it_was_measured_to() -> None:
    table, mask = with_curve(latency_table(4)), SubLayerPlan.of(4, {2, 5})
    for context, skipped in ((16.0, None), (1000.0, None), (300.0, mask)):
        last = table.step_seconds(context, 32, skipped)
        for rows in (32, 48, 56, 256, 400):
            assert table.step_seconds(context, rows, skipped) == pytest.approx(last * rows / 32)
    assert table.most_queries == 256
    assert latency_table(4).most_queries == 32


def test_sequences_add_what_they_were_measured_to_in_the_attention_that_is_kept() -> None:
    table = with_curve(latency_table(4))
    for sequences in (1, 2, 3, 8, 20, 40):
        for skipped, share in (((), 1.0), ({0, 1, 5}, 0.75), (range(8), 0.0)):
            mask = SubLayerPlan.of(4, skipped)
            extra = table.step_seconds(50, 8, mask, sequences) - table.step_seconds(50, 8, mask)
            # Of the 50 tokens that each attends to, 16 were there when sequences were measured.
            keys = 4 * 1e-7 * (50 - 16)
            assert extra == pytest.approx(share * (1e-4 + keys) * (sequences - 1), abs=1e-12)


@pytest.mark.parametrize("sequences", [1, 2, 4, 8])
def test_rows_attend_to_the_tokens_of_their_own_sequence_alone(sequences: int) -> None:
    """Attention costs a constant per pair of row and key here; sequences that share rows have as many pairs as one."""
    table = with_curve(latency_table(4))
    pairs = table.contexts[:, None] * table.queries[None]
    table = replace(table, attention={"full": 1e-4 + 1e-8 * pairs})
    longer = table.step_seconds(200, 8, None, sequences) - table.step_seconds(16, 8, None, sequences)
    assert longer == pytest.approx(4 * 1e-8 * 8 * (200 - 16))


@pytest.mark.parametrize(
    ("part", "values", "says"),
    [
        ("mlp", [-1e-3] * 6, "mlp.0"),
        ("head", [1e-300] * 6, "head.0"),
        ("head", [1e-3] * 5, "head: expected shape"),
        ("attention", {"full": [[1e-3] * 6, [1e-3] * 5, [1e-3] * 6]}, "full: expected rows of equal length"),
        ("attention", {}, "one entry for each"),
        ("attention", dict.fromkeys(("full", "sliding"), [[1e-3] * 6] * 3), "one entry for each"),
        ("overhead", [float("nan")] * 6, "overhead.0"),
        ("spread", {"mlp": [[0.1]]}, "mlp: expected shape"),
        ("queries", [1, 2, 4, 8, 16, 10**400], "queries.5"),
        ("queries", [1, 2, 4, 8, 16, 16], "ascending"),
        ("contexts", list(range(10**6)), "contexts"),
        ("device", {"device": ["cpu"]}, "device.device"),
        ("wide_queries", [32, 64, 96, 128, 192, 256], "wide_queries: expected ascending numbers above 32"),
        ("wide_queries", [48, 64, 96, 128, 256, 192], "wide_queries: expected ascending"),
        ("wide_queries", [48, 64, 96, 128, 192], "growth: expected shape"),
        ("wide_queries", [48, 64, 96, 128, 192, 10**9], "wide_queries.5"),
        ("growth", [0.5, 1.0, 2.0, 3.0, 4.0, 5.0], "growth.0"),
        ("growth", [1.0, 1.5, 1.2, 3.0, 4.0, 5.0], "growth: expected numbers from 1 that never fall"),
        ("sequences", [1, 2, 4, 8, 16], "sequences: expected ascending numbers from 2"),
        ("sequences", [2, 4, 4, 8, 16], "sequences: expected ascending"),
        ("joint", [-1e-3, 0.0, 0.0, 0.0, 0.0], "joint.0"),
        ("joint", [2e-3, 1e-3, 3e-3, 4e-3, 5e-3], "joint: expected numbers from 0 that never fall"),
        ("joint", [1e-3] * 4, "joint: expected shape"),
    ],
)
def test_impossible_tables_are_refused_in_one_line(part: str, values: object, says: str) -> None:
    data = json.loads(with_curve(latency_table(4)).to_json())
    with pytest.raises(ValueError, match=says) as error:
        LatencyTable.from_json(json.dumps(data | {part: values}))
    assert "\n" not in str(error.value)


def test_a_latency_that_falls_goes_on_level_beyond_the_grid() -> None:
    table = latency_table(4)
    table.mlp[-1] = 1e-6
    table.attention["full"][-1] = 1e-6
    assert table.mlp_seconds(10_000) == 1e-6
    assert table.mixer_seconds(1e9, 10_000, "full") == 1e-6


def test_a_step_takes_time_however_negative_its_overhead() -> None:
    table = latency_table(4)
    for overhead in (-1e4, -float(table.step_seconds(300) - table.overhead_seconds(1))):
        table.overhead[:] = overhead
        known = LatencyTable.from_json(table.to_json())
        for mask in (None, SubLayerPlan.of(4, range(8))):
            assert all(known.step_seconds(context, n, mask) > 0 for context in (0, 300, 1e6) for n in (1, 32, 1000))


@given(st.floats(0, 5000), st.floats(1, 32), st.sets(st.integers(0, 7)), st.floats(0.01, 0.9))
def test_what_a_step_saves_on_its_parts_is_not_saved_on_skipped_ones(
    context: float, queries: float, skipped: set[int], saved: float
) -> None:
    """A mask's step ÷ a whole one is its parts ÷ all parts where the overhead is negative."""
    free = replace(latency_table(4), overhead=np.zeros(6))
    table = replace(free, overhead=np.full(6, -saved * free.step_seconds(context, queries)))
    mask = SubLayerPlan.of(4, skipped)
    parts = free.step_seconds(context, queries, mask) / free.step_seconds(context, queries)
    assert table.step_seconds(context, queries, mask) / table.step_seconds(context, queries) == pytest.approx(parts)
