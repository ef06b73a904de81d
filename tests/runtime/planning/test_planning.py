"""Planners choose what the latencies and the acceptance say is fastest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ssd_artifacts.bundle import Bundle
from ssd_profiles.errors import UserError
from ssd_profiles.latency import LatencyTable
from ssd_profiles.mask import SubLayerPlan
from ssd_runtime.drafting.lookup import Lookup, LookupStats
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.model.exit_heads import ExitHeads
from ssd_runtime.planning.auto.auto import AutoPlanner
from ssd_runtime.planning.auto.stream import Stream
from ssd_runtime.planning.auto.verify_stats import VerifyStats
from ssd_runtime.planning.by_context import ByContext
from ssd_runtime.planning.cost import CostModel, Entry, cost_of
from ssd_runtime.planning.frontier import Frontier
from ssd_runtime.planning.makers import make_strategy
from ssd_runtime.planning.mtp import mtp_cost
from ssd_runtime.planning.papers.knapsack import KnapsackPlanner
from ssd_runtime.planning.papers.knn import FixedPlanner, NearestAnchorPlanner
from ssd_runtime.planning.plan import PLAIN, Plan
from ssd_runtime.planning.registry import read_settings
from ssd_runtime.planning.routing import PromptRouter
from ssd_runtime.planning.settings import NearestSettings
from ssd_runtime.planning.strategy import StrategyInputs
from ssd_runtime.search.knapsack import Candidate
from ssd_runtime.sequence.prefill import Prefill
from tests.bundles import LAYERS, bundle, record
from tests.decoding import as_plain
from tests.models import tiny_model
from tests.tables import latency_table, profile

HALF = SubLayerPlan.of(LAYERS, {2, 3, 4, 5})


def frontiers(given: Bundle) -> dict[str, Frontier]:
    return Frontier.of_all(given.domains, LAYERS, latency_table(LAYERS))


def prompt(axis: int, width: int = 32) -> Prefill:
    return Prefill(torch.eye(width)[axis], torch.eye(width)[axis], 10)


def test_the_option_is_the_best_of_the_grid() -> None:
    table, some = latency_table(LAYERS), profile(0.8)
    option = CostModel(table).best_option([Entry("", HALF, some)], 500)
    rates = {
        (length, threshold): some.tokens[i, j]
        / (some.steps[i, j] * table.step_seconds(500, 1, HALF) + table.step_seconds(500, some.steps[i, j] + 1))
        for i, length in enumerate(some.draft_lengths)
        for j, threshold in enumerate(some.thresholds)
    }
    assert rates[option.draft_length, option.threshold] == pytest.approx(max(rates.values()), rel=1e-6)
    place = some.draft_lengths.index(option.draft_length), some.thresholds.index(option.threshold)
    rate = CostModel(table).tokens_per_second(500, float(some.tokens[place]), float(some.steps[place]), HALF)
    assert option.tokens_per_second == pytest.approx(rate)
    assert option.speedup == pytest.approx(option.tokens_per_second * table.step_seconds(500))


def test_masks_shift_to_attention_as_the_context_grows() -> None:
    """KnapSpec's Figure 3 on a made-up device: attention grows with the context, the MLP does not."""
    attention, mlp = (SubLayerPlan.of(LAYERS, skipped) for skipped in ({2, 4, 6}, {3, 5, 7}))
    entries = [Entry("attention", attention, profile(0.9)), Entry("mlp", mlp, profile(0.9))]
    table = latency_table(LAYERS, mlp=4e-4, per_context=1e-6)
    names = [CostModel(table).best_option(entries, context).entry.name for context in (16, 4000)]  # type: ignore[union-attr]
    assert names == ["mlp", "attention"]


def nearest(given: Bundle, axis: int, settings: NearestSettings) -> NearestAnchorPlanner:
    """A planner that has read a prompt."""
    planner = NearestAnchorPlanner(frontiers(given), PromptRouter(given.anchors), latency_table(LAYERS), settings)
    planner.start(None, prompt(axis))  # type: ignore[arg-type]
    return planner


def test_knn_routes_to_the_nearest_anchor_and_uses_its_masks() -> None:
    for axis, domain in enumerate(("one", "two")):
        planner = nearest(bundle(), axis, NearestSettings())
        assert planner.domain == domain
        assert str(planner.plan(100).entry).startswith(domain)


@pytest.mark.parametrize(("out_of_domain", "mask"), [("nearest", {2, 3}), ("mix", {4, 5}), ("plain", None)])
def test_prompts_out_of_domain_go_where_they_are_sent(
    out_of_domain: Literal["nearest", "mix", "plain"], mask: set[int] | None
) -> None:
    given = bundle(one=record("one", {(2, 3): 0.9}), mix=record("mix", {(4, 5): 0.9}))
    planner = nearest(given, 0, NearestSettings(out_of_domain))
    assert planner.plan(100).mask == SubLayerPlan.of(LAYERS, {2, 3})
    planner.start(None, prompt(7))  # type: ignore[arg-type]
    assert planner.plan(100).mask == (None if mask is None else SubLayerPlan.of(LAYERS, mask))


def test_a_bundle_without_mixture_sends_nothing_there() -> None:
    decoder: Any = SimpleNamespace(shape=SimpleNamespace(num_layers=LAYERS))
    table = latency_table(LAYERS)
    with pytest.raises(UserError, match="no mixture"):
        make_strategy(
            StrategyInputs(name="knn", settings=NearestSettings("mix"), decoder=decoder, bundle=bundle(), latency=table)
        )
    mixed = bundle(one=record("one", {(2, 3): 0.9}), mix=record("mix", {(4, 5): 0.9}))
    assert make_strategy(
        StrategyInputs(name="knn", settings=NearestSettings("mix"), decoder=decoder, bundle=mixed, latency=table)
    )()


def test_promises_are_corrected_by_what_was_accepted_in_validation_and_not_by_its_times() -> None:
    table, some = latency_table(LAYERS), profile(0.9)
    row, column = some.draft_lengths.index(4), some.thresholds.index(0.0)
    tokens, steps = float(some.tokens[row, column]), float(some.steps[row, column])
    as_promised, less = (tokens, (tokens - 1) / steps), (1 + (tokens - 1) / 2, (tokens - 1) / 2 / steps)
    for time in (0.5, 1.2):
        given = {
            "one": record("one", {(2, 3): 0.9}, time, as_promised),
            "two": record("two", {(2, 3): 0.9}, time, less),
            "mix": record("mix", {(2, 3): 0.9}),
        }
        found = [each.correction for each in Frontier.of_all(given, LAYERS, table).values()]
        # As many draft steps as promised, half of them right: as much time for fewer tokens.
        fewer = less[0] / tokens
        assert found == pytest.approx([1.0, fewer, (1.0 + fewer) / 2], rel=1e-3)
    for untold in (record("mix", {(2, 3): 0.9}), record("mix", {(2, 3): 0.9}, 1.0, accepted=(0.0, 0.0))):
        assert Frontier.of_all({"mix": untold}, LAYERS, table)["mix"].correction == 1.0


def test_fixed_uses_one_domain_and_plain_without_masks() -> None:
    empty, one = (frontiers(bundle(x=record("x", masks)))["x"] for masks in ({}, {(2, 3): 0.9}))
    assert FixedPlanner(empty, latency_table(LAYERS)).plan(10) is PLAIN
    assert FixedPlanner(one, latency_table(LAYERS)).plan(10).mask is not None


@pytest.mark.parametrize(("agreement", "first"), [(0.98, "one[0]"), (0.3, None)])
def test_knapsack_searches_for_itself_behind_the_bundles_masks(
    agreement: float, first: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masks that promise no gain are not used meanwhile."""
    given = bundle(one=record("one", {(2, 3): agreement}))
    decoder, table = Decoder(tiny_model("llama", num_hidden_layers=LAYERS)), latency_table(LAYERS)
    make = make_strategy(
        StrategyInputs(
            name="knapsack",
            settings=read_settings("knapsack", ["refresh=6", "window=3"]),
            decoder=decoder,
            bundle=given,
            latency=table,
        )
    )
    searched, best = list[int](), KnapsackPlanner._best

    def noted(self: KnapsackPlanner, candidates: Sequence[Candidate], context: int) -> Plan:
        searched.append(context)
        return best(self, candidates, context)

    monkeypatch.setattr(KnapsackPlanner, "_best", noted)
    planner = make()
    got = as_plain(decoder, [9, 8, 7], planner, 90)
    assert planner.domain == "one"
    assert [cycle.plan.entry for cycle in got.cycles[:6]] == [first] * 6
    assert len(got.cycles) > 12
    assert searched == [cycle.context for cycle in got.cycles[6::6]], "once in six cycles"
    assert all(cycle.plan.reason.startswith(("knapsack", "plain: no mask")) for cycle in got.cycles[6:])


def auto(axis: int, **domains: object) -> AutoPlanner:
    given = bundle(**domains)  # type: ignore[arg-type]
    heads: ExitHeads = None  # type: ignore[assignment] # no domain has exits
    stream = Stream()
    for _ in range(3):  # the steps that a stream begins with
        stream.verify.update(1, 0.03, 1.0)
    planner = AutoPlanner(frontiers(given), {}, heads, PromptRouter(given.anchors), latency_table(LAYERS), stream)
    planner.start(SimpleNamespace(load=None, ids=list(range(100)), pending=999, matcher=None), prompt(axis))  # type: ignore[arg-type]
    return planner


@pytest.mark.parametrize("name", ["auto", "lookup"])
def test_a_stream_begins_with_the_successors_that_the_bundle_knows(name: str) -> None:
    decoder, given = Decoder(tiny_model("llama")), bundle()
    make = make_strategy(
        StrategyInputs(
            name=name, settings=read_settings(name, []), decoder=decoder, bundle=given, latency=latency_table(LAYERS)
        )
    )
    one, another = make().successors, make().successors
    assert one is another, "one stream"
    assert one.of(5, 6) == ([1, 2, 3, 4], True)
    assert one.of(9, 6) == ([1, 2, 3, 4], False)


def test_auto_speculates_only_where_that_is_predicted_to_be_faster() -> None:
    good, bad = record("good", {(2, 3, 4, 5): 0.98}), record("bad", {(2, 3, 4, 5): 0.3})
    assert auto(0, good=good, bad=bad).plan(100).mask == HALF
    assert auto(1, good=good, bad=bad).plan(100).mask is None


def test_auto_believes_validation_more_than_prediction() -> None:
    """The choice was predicted to run at 1.2x; measured at 0.5x, every prediction of the domain is corrected."""
    assert auto(0, good=record("good", {(2, 3, 4, 5): 0.98}, measured=0.5)).plan(100).mask is None


def test_auto_uses_the_mixture_out_of_domain() -> None:
    good, mixture = record("good", {(2, 3): 0.98}), record("mix", {(2, 3, 4, 5): 0.98})
    planner = auto(7, good=good, mix=mixture)
    assert planner.domain is None
    assert str(planner.plan(100).entry).startswith("mix")
    assert auto(7, good=good).plan(100).mask is None


def test_requests_that_share_their_steps_can_draft_with_the_mixtures_masks_too() -> None:
    planner = auto(0, good=record("good", {(2, 3): 0.98}), mix=record("mix", {(2, 3, 4, 5): 0.98}))
    found = {domain: planner.draft_sources(domain, Lookup(LookupStats())) for domain in ("good", None)}
    masks = {domain: [each.yields(100, 2) for each in common] for domain, (_, common) in found.items()}
    assert [each[0] for each in masks["good"] if each] == [SubLayerPlan.of(LAYERS, {2, 3}), HALF]
    assert [each[0] for each in masks[None] if each] == [HALF]
    assert [len(sources) for sources, _ in found.values()] == [1, 1]


def stepped(costs: list[float]) -> LatencyTable:
    """Forwards of 1, 2, … rows cost so much, in plain steps, whatever the context."""
    table = latency_table(LAYERS, per_context=0.0, per_token=0.0)
    rows = np.arange(1.0, len(costs) + 1)
    parts = table.step_seconds(0) - 2e-4
    return replace(
        table,
        queries=rows,
        attention={"full": np.full((3, rows.size), table.mixer_seconds(0, 1, "full"))},
        mlp=np.full(rows.size, table.mlp_seconds(1)),
        head=np.full(rows.size, table.head_seconds(1)),
        overhead=parts * np.asarray(costs) - parts,
    )


@given(st.integers(1, 32), st.integers(0, 60), st.lists(st.floats(0.0, 0.2), min_size=32, max_size=32))
def test_a_row_under_load_pays_where_all_together_get_faster(sequences: int, more: int, growth: list[float]) -> None:
    """Tokens of all sequences per second stay where rows bring their own sequence as many tokens as they cost."""
    costs, others = list(accumulate(growth, initial=1.0))[:32], sequences - 1 + more
    loaded = CostModel(stepped(costs)).rows_under_load(100, sequences, others)
    assert loaded[0] == 1.0
    assert all(b >= a - 1e-12 for a, b in pairwise(loaded))
    if sequences == 1 and not others:
        assert loaded == pytest.approx(costs)
    before = sequences / cost_of(costs, others + 1)
    for rows, cost in enumerate(loaded, start=1):
        assert (sequences - 1.0 + cost) / cost_of(costs, others + rows) == pytest.approx(before)


def test_rows_under_load_are_corrected_as_rows_of_that_number_in_all() -> None:
    costs, stats = [1.0 + 0.05 * row for row in range(64)], VerifyStats()
    for rows in (1, 1, 1, *(8, 24, 48) * 40):
        stats.update(rows, costs[rows - 1] * (1.0 + rows / 100), costs[rows - 1])
    assert stats.priced(costs[:32], 300) == pytest.approx(stats.priced(costs[:32], 65)), "beyond what was seen"
    assert stats.priced(costs[:32], 65) != pytest.approx(costs[:32])
    model = CostModel(stepped(costs), stats)
    for others in (1, 7, 24):
        assert model.shared_rows(100, 2, others) == pytest.approx(stats.priced(costs)[others : others + 32])


def test_rows_beyond_the_measured_ones_cost_what_the_last_or_all_of_them_do() -> None:
    """Noise may have flattened the end, but no row is free."""
    assert cost_of([2.0, 3.0], 4) == pytest.approx(3.0 + 2 * 1.5)
    flat_end = [1.0 + 0.1 * min(row, 15) for row in range(24)]
    assert cost_of(flat_end, 34) == pytest.approx(2.5 + 10 * 1.5 / 23)
    steep_end = [1.0 + 0.5 * max(0, row - 15) for row in range(24)]
    assert cost_of(steep_end, 26) == pytest.approx(5.0 + 2 * 0.5)


def test_a_step_of_the_mtp_layer_costs_its_blocks_a_draft_head_and_the_rest_of_a_step() -> None:
    """Two attention blocks, since the projection before the layer weighs as much as one."""
    table = replace(latency_table(LAYERS), draft_head=0.4)
    for context in (16, 2000):
        blocks = 2 * table.mixer_seconds(context, 1, "full") + table.mlp_seconds(1)
        seconds = blocks + 0.4 * table.head_seconds(1) + table.overhead_seconds(1)
        assert mtp_cost(table, context) * table.step_seconds(context) == pytest.approx(seconds)


def test_a_value_is_computed_again_after_64_tokens_and_a_tenth_more_of_them() -> None:
    """Or after 64 tokens fewer, as the mean context of several sequences may have."""
    value = ByContext(lambda context: context, growth=1.1)
    for context in range(100, 3000):
        assert value.at(context) <= context < max(value.at(context) + 64, 1.1 * value.at(context))
    latest = value.at(2999)
    assert latest < 2950
    assert [value.at(latest - 63), value.at(latest - 64)] == [latest, latest - 64]
