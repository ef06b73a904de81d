"""A search finds planted layers, within its bounds and reproducibly."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import pytest

from bench.fixtures.hard_planted import plant_diffuse, plant_pairs
from bench.fixtures.planted import plant
from ssd_compiler.calibrate import continue_prompts, reference_states, samples_of
from ssd_compiler.search.bayesian import Subspace, Variable, optimise, skippable_spans, undecided_sublayers
from ssd_compiler.search.evaluate import FAR_BEHIND, Evaluator, Rated
from ssd_compiler.search.frontier import select_frontier
from ssd_compiler.search.search import SearchBounds, SearchResult, _perfect_runs, light_masks, search, uniform_masks
from ssd_compiler.settings import SearchMethod
from ssd_profiles.acceptance import Trace
from ssd_profiles.latency import LatencyTable
from ssd_profiles.mask import SubLayerPlan
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.planning.cost import CostModel, Entry
from ssd_runtime.search.replay import ReferenceStates
from tests.models import tiny_model
from tests.tables import latency_table, with_light_costs

MODEL, WEAK = plant(tiny_model("llama", seed=6, max_position_embeddings=256), 0.02, 4)
DECODER = Decoder(MODEL)
TABLE = latency_table(8, per_token=1e-6)


@pytest.fixture(scope="module")
def reference() -> ReferenceStates:
    prompts = [[1 + i, 2, 3 + 2 * i] for i in range(4)]
    return reference_states(
        DECODER, samples_of(continue_prompts(DECODER, prompts, 33, frozenset(), lambda: None), "test")
    )


def run(reference: ReferenceStates, evaluations: int = 40, seed: int = 0) -> tuple[SearchResult, list[bool]]:
    said: list[bool] = []
    bounds = SearchBounds(evaluations, float("inf"), seed, 8)
    result = search(
        DECODER, reference, TABLE, 60, bounds, lambda: None, lambda _p, _s, worthwhile: said.append(worthwhile)
    )
    return result, said


def test_the_planted_layers_are_found(reference: ReferenceStates) -> None:
    result, said = run(reference)
    best = result.frontier[result.finalists[0]].sub_layer_plan(8)
    assert best.jaccard(WEAK) >= 0.75
    assert said == [True]
    assert result.oracle_speedup >= 1.2
    assert result.cost.evaluations <= 40
    assert 0 < result.cost.target_forwards < 40


def test_progress_rises_to_what_was_found(reference: ReferenceStates) -> None:
    result, _ = run(reference)
    seconds, speedups = zip(*result.cost.progress, strict=True)
    assert sorted(seconds) == list(seconds)
    assert 0 <= seconds[0] <= seconds[-1] <= result.cost.seconds
    assert all(later > earlier for earlier, later in pairwise(speedups))
    entry = result.frontier[result.finalists[0]]
    found = CostModel(TABLE).best_option([Entry(entry.mask, entry.sub_layer_plan(8), entry.profile())], 60)
    assert found is not None
    assert speedups[-1] == pytest.approx(found.speedup, rel=2e-3)


def test_equal_seeds_give_equal_frontiers(reference: ReferenceStates) -> None:
    assert run(reference, seed=3)[0].frontier == run(reference, seed=3)[0].frontier


def test_no_entry_of_a_frontier_beats_another_in_everything(reference: ReferenceStates) -> None:
    entries = run(reference)[0].frontier
    points = [
        (e.sub_layer_plan(8).attention_skipped, e.sub_layer_plan(8).mlp_skipped, e.token_agreement) for e in entries
    ]
    for one in points:
        assert not any(other != one and all(a >= b for a, b in zip(other, one, strict=True)) for other in points)


def test_a_model_without_spare_layers_is_a_no(reference: ReferenceStates) -> None:
    model = tiny_model("llama", seed=6, max_position_embeddings=256)
    decoder = Decoder(model)
    prompts = [[1 + i, 2, 3 + 2 * i] for i in range(2)]
    found = continue_prompts(decoder, prompts, 33, frozenset(), lambda: None)
    own = reference_states(decoder, samples_of(found, "test"))
    said: list[bool] = []
    result = search(
        decoder, own, latency_table(4), 60, SearchBounds(60, float("inf"), 0, 8), lambda: None,
        lambda _p, _s, worthwhile: said.append(worthwhile),
    )  # fmt: skip
    assert said == [False]
    assert "bayesian" not in {entry.origin for entry in result.frontier}
    assert result.cost.evaluations < 60


def evaluator(reference: ReferenceStates, most: int) -> Evaluator:
    return Evaluator(DECODER, reference, TABLE, 60, 8, most, float("inf"), lambda: None)


def test_bayesian_search_improves_on_where_it_starts(reference: ReferenceStates) -> None:
    some = evaluator(reference, 60)
    spoiled = set(WEAK)
    for wrong in sorted(spoiled)[:3]:
        some.rate(SubLayerPlan.of(8, spoiled - {wrong}), "start")
    some.rate(SubLayerPlan.of(8, spoiled ^ {0}), "start")
    before = some.best().speedup
    optimise(some, seed=0)
    assert some.best().speedup > before
    assert len(some.rated) <= 60


def test_undecided_are_those_that_good_masks_disagree_on(reference: ReferenceStates) -> None:
    some = evaluator(reference, 9)
    masks = [SubLayerPlan.of(8, {4, 5, 6}), SubLayerPlan.of(8, {4, 5}), SubLayerPlan.of(8, {4, 5, 6, 7})]
    rated = [some.rate(mask, "x") for mask in masks]
    assert set(undecided_sublayers(rated + rated)) <= {6, 7}


def test_bounds_hold(reference: ReferenceStates) -> None:
    some = evaluator(reference, 3)
    some.rate_all((SubLayerPlan.of(8, {i}) for i in range(16)), "x")
    assert len(some.rated) == 3
    late = Evaluator(DECODER, reference, TABLE, 60, 8, 99, 0.0, lambda: None)
    assert late.rate_all([WEAK], "x") == []


def test_a_mask_is_held_against_the_best_on_the_same_sequences(
    reference: ReferenceStates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first sequence is hard for all masks: one that is as good there and better elsewhere is not given up."""
    tokens = 32

    def replay_mask(_: object, states: ReferenceStates, mask: SubLayerPlan, __: object) -> list[Trace]:
        right = [0.6, *[0.99 if mask == better else 0.93 if mask == good else 0.5] * 3] if mask != bad else [0.2] * 4
        held = [np.arange(tokens) < share * tokens for share in right[: len(states.groups)]]
        return [Trace(matches, np.full(tokens, 0.9)) for matches in held]

    monkeypatch.setattr("ssd_compiler.search.evaluate.replay_mask", replay_mask)
    good, better, bad = (
        SubLayerPlan.of(8, range(2, 12)),
        SubLayerPlan.of(8, range(3, 13)),
        SubLayerPlan.of(8, range(1, 11)),
    )
    some = evaluator(reference, 9)
    for mask in (good, better, bad):
        some.rate(mask, "x")
    assert some.best().mask == better
    assert [some.rated[mask].complete for mask in (good, better, bad)] == [True, True, False]


def test_a_mask_that_was_given_up_is_not_rated_above_the_best_because_the_first_sequence_is_easy(
    reference: ReferenceStates, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = 32

    def replay_mask(_: object, states: ReferenceStates, mask: SubLayerPlan, __: object) -> list[Trace]:
        right = [0.99 if mask == good else 0.7, *[0.3] * 3]
        held = [np.arange(tokens) < share * tokens for share in right[: len(states.groups)]]
        return [Trace(matches, np.full(tokens, 0.9)) for matches in held]

    monkeypatch.setattr("ssd_compiler.search.evaluate.replay_mask", replay_mask)
    good, given_up = SubLayerPlan.of(8, range(2, 12)), SubLayerPlan.of(8, range(1, 11))
    some = evaluator(reference, 9)
    best, rated = some.rate(good, "x"), some.rate(given_up, "x")
    assert not rated.complete
    assert best.speedup < rated.option.speedup, "the first sequence alone"
    assert rated.speedup < FAR_BEHIND * best.speedup


def test_the_knapsack_leaves_the_others_their_share_of_the_time(
    reference: ReferenceStates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An evaluation takes a second of twenty."""
    now = [0.0]

    def tick() -> None:
        now[0] += 1.0

    for module in ("search.search", "search.evaluate"):
        monkeypatch.setattr(f"ssd_compiler.{module}.perf_counter", lambda: now[0])
    found = list[str]()
    monkeypatch.setattr(Evaluator, "rate", noting(Evaluator.rate, found))
    search(DECODER, reference, TABLE, 60, SearchBounds(10_000, 20.0, 0, 8), tick, lambda *_: None)
    assert 7 <= found.count("knapsack") <= 12
    assert {"uniform", "random"} <= set(found)
    assert now[0] <= 21.0


def noting(rate: Callable[..., Rated], found: list[str]) -> Callable[..., Rated]:
    def noted(self: Evaluator, mask: SubLayerPlan, origin: str) -> Rated:
        found.extend([] if mask in self.rated else [origin])
        return rate(self, mask, origin)

    return noted


def test_a_frontier_is_chosen_for_contexts_that_the_model_has(reference: ReferenceStates) -> None:
    """Longer ones have no say."""
    some = evaluator(reference, 99)
    some.rate_all((SubLayerPlan.of(8, range(0, 2 * n, 2)) for n in range(1, 9)), "attention")
    some.rate_all((SubLayerPlan.of(8, range(1, 2 * n, 2)) for n in range(1, 9)), "mlp")
    asked = set[int]()

    class Table(LatencyTable):
        def step_seconds(self, context: float, queries: float = 1, mask: SubLayerPlan | None = None) -> float:
            asked.add(int(context))
            return super().step_seconds(context, queries, mask)

    table = Table(*(getattr(TABLE, each.name) for each in dataclasses.fields(TABLE)))
    select_frontier(list(some.rated.values()), table, 60, 2048)
    assert asked == {60, 128, 512, 2048}


def test_no_time_at_all_still_gives_a_frontier(reference: ReferenceStates) -> None:
    bounds = SearchBounds(10_000, 0.0, 0, 8)
    result = search(DECODER, reference, TABLE, 60, bounds, lambda: None, lambda *_: None)
    assert result.cost.evaluations == 1
    assert len(result.frontier) == 1


@pytest.mark.parametrize("layers", [1, 2])
def test_models_of_one_or_two_layers(layers: int) -> None:
    decoder = Decoder(tiny_model("llama", num_hidden_layers=layers))
    found = continue_prompts(decoder, [[1, 2, 3]], 9, frozenset(), lambda: None)
    own = reference_states(decoder, samples_of(found, "test"))
    bounds = SearchBounds(12, float("inf"), 0, 8)
    result = search(decoder, own, latency_table(layers), 20, bounds, lambda: None, lambda *_: None)
    assert all(entry.mask.strip("0") for entry in result.frontier)


def test_perfect_foresight_never_drafts_in_vain() -> None:
    trace = Trace(np.array([1, 1, 0, 0, 1, 1, 1], bool), np.ones(7))
    assert list(_perfect_runs(trace, 16)) == [2, 0, 3]


def test_uniform_masks_keep_first_and_last_layer() -> None:
    for layers in (2, 3, 30):
        for mask in uniform_masks(layers):
            assert not {0, 1, 2 * layers - 2, 2 * layers - 1} & set(mask)
            assert mask.attention_skipped == mask.mlp_skipped


@pytest.fixture(scope="module")
def pairs() -> tuple[Decoder, ReferenceStates, SubLayerPlan]:
    """A model with four pairs of layers whose MLPs cancel."""
    model, weak = plant_pairs(tiny_model("llama-biases", seed=6, max_position_embeddings=256), 4, 1.0)
    decoder = Decoder(model)
    prompts = [[1 + i, 2, 3 + 2 * i] for i in range(4)]
    found = continue_prompts(decoder, prompts, 33, frozenset(), lambda: None)
    return decoder, reference_states(decoder, samples_of(found, "test")), weak


def searched(
    pairs: tuple[Decoder, ReferenceStates, SubLayerPlan], method: SearchMethod, evaluations: int
) -> dict[str, list[float]]:
    """Predicted speed-ups of all rated masks by origin."""
    decoder, reference, _ = pairs
    bounds = SearchBounds(evaluations, float("inf"), 0, 8, method)
    table = latency_table(decoder.shape.num_layers, per_token=1e-6)
    prompts = [[1, 2, 3], [4, 5]]
    found = search(decoder, reference, table, 60, bounds, lambda: None, lambda *_: None, prompts)
    speeds = dict[str, list[float]]()
    for _, origin, speedup in found.cost.rated:
        speeds.setdefault(origin, []).append(speedup)
    assert sum(map(len, speeds.values())) == found.cost.evaluations <= evaluations
    assert {entry.origin for entry in found.frontier} <= set(speeds)
    return speeds


def test_pairs_that_cancel_are_found_by_bayesian_optimisation_alone(
    pairs: tuple[Decoder, ReferenceStates, SubLayerPlan],
) -> None:
    """A dynamic programme compares states after every sub-layer, so it never skips the first of a pair."""
    both = searched(pairs, "both", 48)
    assert max(both["bayesian"]) > 1.02 * max(both["knapsack"])
    few = searched(pairs, "both", 24)
    assert len(few["bayesian"]) == SearchBounds(24, 0.0, 0, 8).reserved == 12
    alone = searched(pairs, "knapsack", 48)
    assert set(alone) == {"knapsack"}
    assert max(alone["knapsack"]) < max(both["bayesian"])


def test_methods_rate_masks_of_their_own_origin_only(pairs: tuple[Decoder, ReferenceStates, SubLayerPlan]) -> None:
    assert set(searched(pairs, "bayesian", 16)) == {"uniform", "random", "bayesian"}
    assert set(searched(pairs, "self-sd", 3)) == {"self-sd"}


def test_a_search_by_the_clock_ends_at_its_deadline(
    pairs: tuple[Decoder, ReferenceStates, SubLayerPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mask takes a minute of four and a half."""
    now = [0.0]

    def timed(decoder: Decoder, prompts: Sequence[list[int]], mask: SubLayerPlan) -> float:
        now[0] += 60.0
        return float(len(list(mask)))

    monkeypatch.setattr("ssd_compiler.search.self_sd.tokens_per_second", timed)
    for module in ("search.search", "search.evaluate", "search.self_sd"):
        monkeypatch.setattr(f"ssd_compiler.{module}.perf_counter", lambda: now[0])
    decoder, own, _ = pairs
    bounds = SearchBounds(1000, 270.0, 0, 8, "self-sd")
    table = latency_table(decoder.shape.num_layers, per_token=1e-6)
    found = search(decoder, own, table, 60, bounds, lambda: None, lambda *_: None, [[1, 2]])
    assert found.cost.evaluations == 5
    assert found.cost.seconds == 300.0


def test_spans_that_undo_each_other_come_first(pairs: tuple[Decoder, ReferenceStates, SubLayerPlan]) -> None:
    """They need not be skipped by any mask before."""
    decoder, reference, weak = pairs
    layers = decoder.shape.num_layers
    some = Evaluator(decoder, reference, latency_table(layers), 60, 8, 9, float("inf"), lambda: None)
    some.rate(SubLayerPlan.of(layers, {1}), "start")
    first = skippable_spans(some)[:4]
    assert all(group <= set(weak) for group in first)
    # One span holds both MLPs of a pair, and so never one alone.
    firsts = sorted({index // 2 for index in weak})[::2]
    assert all((2 * one + 1 in group) == (2 * one + 3 in group) for group in first for one in firsts)


def test_a_quarter_of_the_evaluations_is_reserved_and_64_where_that_is_half_at_most() -> None:
    reserved = [SearchBounds(evaluations, 0.0, 0, 8).reserved for evaluations in (8, 24, 96, 128, 256, 400, 1000)]
    assert reserved == [4, 12, 48, 64, 64, 100, 250]


def test_points_of_a_subspace_are_masks_around_its_incumbent() -> None:
    incumbent = SubLayerPlan.of(8, {1, 2, 3, 9})
    groups = (frozenset({2}), frozenset({3, 4, 5}), frozenset({12, 13}))
    space = Subspace(incumbent, tuple(map(Variable, groups)), usual=SubLayerPlan.of(8))
    assert space.start == (1, 0, 0)
    assert space.mask(space.start) == incumbent
    assert set(space.mask((0, 0, 0))) == {1, 3, 9}
    assert set(space.mask((1, 1, 0))) == {1, 2, 3, 4, 5, 9}
    assert set(space.mask((0, 1, 1))) == {1, 3, 4, 5, 9, 12, 13}


def test_points_of_a_subspace_change_precisions_too() -> None:
    usual = SubLayerPlan.of(8).lightened(8)
    incumbent = SubLayerPlan.of(8, {1, 9}).lightened(usual.light[0]).lightened({4: 4, 5: 0})
    variables = (Variable(frozenset({2, 3}), 4), Variable(frozenset({4}), 4), Variable(frozenset({1})))
    space = Subspace(incumbent, (*variables, Variable(frozenset({16}), 0)), usual)
    assert space.start == (0, 1, 1, 0)
    assert space.mask(space.start) == incumbent
    assert space.mask((1, 1, 1, 1)) == incumbent.lightened({2: 4, 3: 4, 16: 0})
    unskipped = SubLayerPlan.of(8, {9}).lightened(8).lightened({4: 4, 5: 0})
    assert space.mask((0, 1, 0, 0)) == unskipped
    assert space.mask((0, 0, 1, 0)) == incumbent.lightened({4: 8})


# With light copies of the weights


@pytest.fixture(scope="module")
def lit() -> tuple[Decoder, ReferenceStates]:
    decoder = Decoder(MODEL)
    decoder.lighten("auto", [SubLayerPlan.of(8).lightened(4)])
    prompts = [[1 + i, 2, 3 + 2 * i] for i in range(4)]
    found = continue_prompts(decoder, prompts, 33, frozenset(), lambda: None)
    return decoder, reference_states(decoder, samples_of(found, "test"))


LIT = with_light_costs(TABLE, 0.5, (8, 4))


def search_lit(lit: tuple[Decoder, ReferenceStates], method: SearchMethod = "both") -> SearchResult:
    bounds = SearchBounds(40, float("inf"), 0, 8, method)
    return search(lit[0], lit[1], LIT, 60, bounds, lambda: None, lambda *_: None)


@pytest.fixture(scope="module")
def found_lit(lit: tuple[Decoder, ReferenceStates]) -> SearchResult:
    return search_lit(lit)


def test_light_and_skip_together_beat_either_alone(
    lit: tuple[Decoder, ReferenceStates], found_lit: SearchResult
) -> None:
    """On planted layers: the best mask skips weak layers and runs others lighter."""
    speedups = {text: speedup for text, _, speedup in found_lit.cost.rated}
    best = SubLayerPlan.from_hex(max(speedups, key=lambda text: speedups[text]), 8)
    assert len(list(best)) >= 4
    assert set(best) <= set(WEAK)
    assert best.light
    alone = [speedups[mask.hex()] for mask in light_masks(lit[0])]
    in_full = [speedup for text, speedup in speedups.items() if "." not in text]
    assert speedups[best.hex()] > 1.1 * max(*alone, *in_full)


def test_every_method_searches_all_precisions(lit: tuple[Decoder, ReferenceStates]) -> None:
    for method, own in (("knapsack", "knapsack"), ("bayesian", "bayesian")):
        result = search_lit(lit, method)  # type: ignore[arg-type]
        masks = [SubLayerPlan.from_hex(text, 8) for text, origin, _ in result.cost.rated if origin == own]
        used = {-1 if skip else mask.bits_of(i) for mask in masks for i, skip in enumerate(mask.skipped)}
        assert used == {-1, 0, 8, 4}, method


def test_a_frontier_keeps_masks_for_devices_without_copies(found_lit: SearchResult) -> None:
    masks = [entry.sub_layer_plan(8) for entry in found_lit.frontier]
    assert any(mask.light for mask in masks)
    in_full = [entry for entry, mask in zip(found_lit.frontier, masks, strict=True) if not mask.light]
    found = CostModel(TABLE).best_option([Entry.of(e, 8) for e in in_full], 60)
    assert found is not None
    assert found.speedup > 1.1


def test_no_entry_is_lighter_and_more_right_than_another(found_lit: SearchResult) -> None:
    entries = found_lit.frontier
    for one in entries:
        for other in entries:
            if one is not other and other.token_agreement >= one.token_agreement:
                mine, theirs = (_ranks(each.sub_layer_plan(8)) for each in (one, other))
                assert any(a < b for a, b in zip(mine, theirs, strict=True)) or mine == theirs


def _ranks(mask: SubLayerPlan) -> list[int]:
    """For attention, MLP and head, the lightest precision first, the number of each block's rank, sorted."""
    order = {-1: 0, 4: 1, 8: 2, 0: 3}
    of = [order[-1 if skip else mask.bits_of(i)] for i, skip in enumerate(mask.skipped)]
    return [*sorted(of[0::2]), *sorted(of[1::2]), order[mask.head_bits]]


def test_diffuse_layers_are_weak_by_different_factors() -> None:
    base = tiny_model("llama", seed=6)
    model, half = plant_diffuse(base, 6, 0.01, 1.0)
    assert model.config.num_hidden_layers == base.config.num_hidden_layers + 6
    assert len(list(half)) == 6
    norms = sorted(
        float((layer.mlp.down_proj.weight.norm() / base.model.layers[0].mlp.down_proj.weight.norm()).detach())
        for layer in model.model.layers
    )
    assert norms[0] < 0.1
    assert len({round(norm, 3) for norm in norms}) > 6


def test_what_is_reserved_costs_nothing_under_diffuse_redundancy() -> None:
    """There is no clean half and nothing that only the optimiser finds; the programme alone has all evaluations."""
    model, _ = plant_diffuse(tiny_model("llama", seed=6, max_position_embeddings=256), 6, 0.01, 0.5)
    decoder = Decoder(model)
    prompts = [[1 + i, 2, 3 + 2 * i] for i in range(4)]
    found = continue_prompts(decoder, prompts, 33, frozenset(), lambda: None)
    diffuse = decoder, reference_states(decoder, samples_of(found, "test")), SubLayerPlan.of(decoder.shape.num_layers)
    best = {method: max(map(max, searched(diffuse, method, 24).values())) for method in ("both", "knapsack")}
    assert best["knapsack"] > 1.0
    assert best["both"] > 0.99 * best["knapsack"]
