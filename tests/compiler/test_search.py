"""A search finds planted layers, within its bounds and reproducibly."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from bench.fixtures.planted import add_biases, plant, plant_at
from ssd_compiler.search.bayesian import (
    DIMENSIONS,
    Group,
    Subspace,
    Variable,
    _round,
    _variables,
    optimise,
    skippable_spans,
    undecided_sublayers,
)
from ssd_compiler.search.evaluate import Evaluator, Rated
from ssd_compiler.search.frontier import FRONTIER_ENTRIES, select_finalists, select_frontier
from ssd_compiler.search.search import SearchBounds, SearchResult, _oracle_speedup, search
from ssd_compiler.settings import SearchMethod
from ssd_profiles.acceptance import Trace
from ssd_profiles.latency import LatencyTable
from ssd_profiles.mask import SubLayerPlan
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.model.projections import LightCopies
from ssd_runtime.planning.cost import CostModel, Entry
from ssd_runtime.search.replay import ReferenceStates, replay_mask
from tests.models import tiny_model
from tests.references import FOUR, referenced
from tests.tables import latency_table, profile, with_light_costs

MODEL, WEAK = plant(tiny_model("llama", seed=6, max_position_embeddings=256), 0.02, 4)
DECODER = Decoder(MODEL)
TABLE = latency_table(8, per_token=1e-6)


@pytest.fixture(scope="module")
def reference() -> ReferenceStates:
    return referenced(DECODER, FOUR, 33)


def run(
    reference: ReferenceStates, decoder: Decoder = DECODER, table: LatencyTable = TABLE, evaluations: int = 40
) -> tuple[SearchResult, list[bool]]:
    """The result of a search, and whether it said that the masks are worth while."""
    said: list[bool] = []
    bounds = SearchBounds(evaluations, float("inf"), 0, 8)
    result = search(
        decoder, reference, table, 60, bounds, lambda: None, lambda _p, _s, worthwhile: said.append(worthwhile)
    )
    return result, said


@pytest.fixture(scope="module")
def found(reference: ReferenceStates) -> tuple[SearchResult, list[bool]]:
    return run(reference)


def test_the_planted_layers_are_found(found: tuple[SearchResult, list[bool]]) -> None:
    result, said = found
    best = result.frontier[result.finalists[0]].sub_layer_plan(8)
    assert best.jaccard(WEAK) >= 0.75
    assert said == [True]
    assert result.oracle_speedup >= 1.2
    assert result.cost.evaluations <= 40
    assert 0 < result.cost.target_forwards < 40


def test_equal_seeds_give_equal_frontiers(reference: ReferenceStates, found: tuple[SearchResult, list[bool]]) -> None:
    assert run(reference)[0].frontier == found[0].frontier


def test_no_entry_of_a_frontier_beats_another_in_everything(found: tuple[SearchResult, list[bool]]) -> None:
    entries = found[0].frontier
    points = [
        (e.sub_layer_plan(8).mixers_skipped, e.sub_layer_plan(8).mlps_skipped, e.token_agreement) for e in entries
    ]
    for one in points:
        assert not any(other != one and all(a >= b for a, b in zip(other, one, strict=True)) for other in points)


def test_finalists_are_the_fastest_that_timing_could_tell_apart() -> None:
    """Nine of ten sub-layers alike are too many, and so are seven of eight; six of ten are not."""
    masks = [SubLayerPlan.of(8, range(*ends)) for ends in ((0, 10), (0, 9), (2, 10), (3, 12), (3, 11))]
    speeds = [1.3, 1.4, 1.1, 1.2, 1.0]
    rated = [SimpleNamespace(mask=mask, speedup=speed) for mask, speed in zip(masks, speeds, strict=True)]
    assert select_finalists(rated) == [1, 3, 2]  # type: ignore[arg-type]


def test_a_model_without_spare_layers_is_a_no(reference: ReferenceStates) -> None:
    model = tiny_model("llama", seed=6, max_position_embeddings=256)
    decoder = Decoder(model)
    own = referenced(decoder, FOUR[:2], 33)
    result, said = run(own, decoder, latency_table(4), 60)
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


def test_a_group_that_is_changed_back_has_the_usual_precision() -> None:
    usual, incumbent = (SubLayerPlan.of(4, skipped).lightened(8) for skipped in ((), {2, 3}))
    groups = Variable(frozenset({2, 3})), Variable(frozenset({5}), 4), Variable(frozenset({8}), 4)
    space = Subspace(incumbent, groups, usual)
    assert space.start == (1, 0, 0)
    assert space.mask(space.start) == incumbent
    assert space.mask((0, 0, 0)) == usual
    assert space.mask((1, 1, 1)) == incumbent.lightened({5: 4, 8: 4})


def test_spans_come_first_that_move_the_state_least_for_the_time_they_save(reference: ReferenceStates) -> None:
    """Sub-layers that the best mask skips already are not counted: to skip them saves no time."""
    some, known = evaluator(reference, 9), {3, 4}
    some.rate(SubLayerPlan.of(8, known), "x")
    seconds = TABLE.sublayer_seconds(60, 1)

    def moved(span: Group) -> float:
        ends = (reference.states[place] for place in (min(span), max(span) + 1))
        return 1.0 - float(torch.cosine_similarity(*ends, -1).mean())

    spans = skippable_spans(some)
    costs = [moved(span) / sum(seconds[index] for index in span - known) for span in spans]
    assert costs == sorted(costs)
    every = {frozenset(range(first, last)) for last in range(17) for first in range(max(0, last - 6), last)}
    assert set(spans) == {span for span in every if not span <= known}


def test_sublayers_come_first_on_which_the_better_masks_disagree_most() -> None:
    skipped = ({0, 1, 2}, {0, 1}, {0}, {0}, {3}, {4}, {5}, {6})
    rated = [SimpleNamespace(mask=SubLayerPlan.of(4, some), speedup=-place) for place, some in enumerate(skipped)]
    assert undecided_sublayers(rated) == [1, 2]  # type: ignore[arg-type]


def test_variables_share_no_sublayer_and_come_once(reference: ReferenceStates) -> None:
    some, tried = evaluator(reference, 9), set[Variable]()
    some.rate_all([SubLayerPlan.of(8, skipped) for skipped in ({3}, {4}, {3, 4}, {8, 9})], "x")
    for _ in range(3):
        chosen = _variables(some, tried)
        assert 0 < len(chosen) <= DIMENSIONS
        assert sum(len(each.group) for each in chosen) == len(frozenset().union(*(each.group for each in chosen)))
        assert not tried & set(chosen)
        tried |= set(chosen)


def test_changes_that_gain_alone_are_tried_together_next() -> None:
    asked, wanted = list[set[int]](), {1, 5}

    def rate(mask: SubLayerPlan, _: str) -> SimpleNamespace:
        asked.append(set(mask))
        return SimpleNamespace(speedup=1.0 - 0.1 * len(asked[-1] ^ wanted))

    groups = tuple(Variable(frozenset({index})) for index in (1, 2, 5, 6))
    space = Subspace(SubLayerPlan.of(4), groups, SubLayerPlan.of(4))
    list(_round(SimpleNamespace(rate=rate, exhausted=False), space, 0))  # type: ignore[arg-type]
    assert asked[:6] == [set(), {1}, {2}, {5}, {6}, wanted]


def test_a_search_gathers_the_precisions_of_a_model_once(
    reference: ReferenceStates, monkeypatch: pytest.MonkeyPatch
) -> None:
    gathered, bits_of_each = list[int](), LightCopies.bits_of_each

    def watched(self: LightCopies) -> list[tuple[int, ...]]:
        gathered.append(1)
        return bits_of_each.fget(self)  # type: ignore[attr-defined, no-any-return]

    monkeypatch.setattr(LightCopies, "bits_of_each", property(watched))
    some = evaluator(reference, 20)
    some.rate(SubLayerPlan.of(8, {3}), "start")
    known = len(gathered)
    optimise(some, seed=0)
    assert len(gathered) == known <= 2


def test_bounds_hold(reference: ReferenceStates) -> None:
    some = evaluator(reference, 3)
    some.rate_all((SubLayerPlan.of(8, {i}) for i in range(16)), "x")
    assert len(some.rated) == 3
    late = Evaluator(DECODER, reference, TABLE, 60, 8, 99, 0.0, lambda: None)
    assert late.rate_all([WEAK], "x") == []


def test_no_row_is_replayed_twice(reference: ReferenceStates, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Counter[SubLayerPlan]()

    def replayed(decoder: Decoder, part: ReferenceStates, mask: SubLayerPlan, block: int) -> list[Trace]:
        rows[mask] += len(part)
        return replay_mask(decoder, part, mask, block)

    monkeypatch.setattr("ssd_compiler.search.evaluate.replay_mask", replayed)
    some = evaluator(reference, 99)
    rated = some.rate_all([WEAK, *(SubLayerPlan.of(8, set(WEAK) - {index}) for index in WEAK)], "x")
    assert {each.complete for each in rated} == {True, False}
    for each in rated:
        assert rows[each.mask] == len(reference if each.complete else reference.groups[0])
    traces = replay_mask(DECODER, reference, WEAK, 8)
    for whole, part in zip(traces, some.rated[WEAK].traces, strict=True):
        assert (whole.matches == part.matches).all()
        assert np.allclose(whole.confidence, part.confidence, atol=1e-5)


@pytest.mark.parametrize(("skipped", "share"), [({8, 9}, 6 / 16), ({0, 15}, 14 / 16), (range(16), 0.0)])
def test_a_forward_counts_the_sublayers_that_it_runs(
    skipped: Sequence[int], share: float, reference: ReferenceStates
) -> None:
    """Those before the first that is skipped have run already."""
    some = evaluator(reference, 99)
    some.rate(SubLayerPlan.of(8, skipped), "x")
    assert some.forwards == pytest.approx(share)


def test_the_oracle_ends_every_draft_before_its_first_error(
    reference: ReferenceStates, monkeypatch: pytest.MonkeyPatch
) -> None:
    matches = np.asarray([True, True, True, False, False, True, False, True] * 4)
    traces = [Trace(matches, np.ones(32)) for _ in range(4)]
    monkeypatch.setattr("ssd_compiler.search.evaluate.replay_mask", lambda _, part, *__: traces[: len(part.groups)])
    some = evaluator(reference, 9)
    some.rate(WEAK, "x")
    draft, rates = TABLE.step_seconds(60, 1, WEAK), list[float]()
    for length in range(1, 17):
        place = seconds = tokens = 0.0
        while place < 32:
            right = matches[int(place) : int(place) + length].tolist()
            run = [*right, False].index(False)
            seconds += run * draft + TABLE.step_seconds(60, run + 1)
            tokens += run + 1
            place += run + 1
        rates.append(tokens / seconds)
    assert _oracle_speedup(some) == pytest.approx(max(1.0, max(rates) * TABLE.step_seconds(60)))
    assert max(rates) * TABLE.step_seconds(60) > 1.0


def test_a_mask_of_a_mixture_is_not_set_aside_before_every_domain_was_looked_at(
    reference: ReferenceStates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second mask fails in one domain of four, and is the best in the others."""

    def replayed(decoder: Decoder, part: ReferenceStates, mask: SubLayerPlan, block: int) -> list[Trace]:
        easy = [group.cache is not reference.groups[0].cache for group in part.groups]
        right = [np.arange(32) % 4 == 0 if mask == WEAK else np.full(32, each) for each in easy]
        return [Trace(matches, matches.astype(float)) for matches in right]

    monkeypatch.setattr("ssd_compiler.search.evaluate.replay_mask", replayed)
    other = SubLayerPlan.of(8, set(WEAK) ^ {0})
    for look, complete in ((1, False), (4, True)):
        some = replace(evaluator(reference, 99), look=look)
        some.rate(WEAK, "x")
        assert some.rate(other, "x").complete is complete
    assert some.best().mask == other


def test_a_mask_that_was_set_aside_is_no_better_than_the_best(
    reference: ReferenceStates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first text is easy: there it is faster than the best one is on all, and much slower than that is there."""

    def replayed(decoder: Decoder, part: ReferenceStates, mask: SubLayerPlan, block: int) -> list[Trace]:
        easy = [group.cache is reference.groups[0].cache for group in part.groups]
        right = [np.full(32, each) & ((mask == WEAK) | (np.arange(32) % 2 > 0)) for each in easy]
        return [Trace(matches, np.ones(32)) for matches in right]

    monkeypatch.setattr("ssd_compiler.search.evaluate.replay_mask", replayed)
    some = evaluator(reference, 99)
    best, aside = some.rate(WEAK, "x"), some.rate(SubLayerPlan.of(8, set(WEAK) ^ {0}), "x")
    assert not aside.complete
    assert aside.option.speedup > best.speedup > aside.speedup
    assert some.best() is best
    assert select_frontier([best, aside], TABLE, 60, 256) == [best]


def test_a_quarter_of_the_time_is_left_to_bayesian_optimisation(
    reference: ReferenceStates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass over all rows takes a second, and all else nothing."""
    now = [0.0]

    def timed(decoder: Decoder, part: ReferenceStates, mask: SubLayerPlan, block: int) -> list[Trace]:
        now[0] += len(part) / len(reference)
        return replay_mask(decoder, part, mask, block)

    monkeypatch.setattr("ssd_compiler.search.evaluate.replay_mask", timed)
    for module in ("search.search", "search.evaluate"):
        monkeypatch.setattr(f"ssd_compiler.{module}.perf_counter", lambda: now[0])
    found = search(DECODER, reference, TABLE, 60, SearchBounds(999, 16.0, 0, 8), lambda: None, lambda *_: None)
    assert Counter(origin for _, origin, _ in found.cost.rated)["bayesian"] >= 2
    assert 15.0 <= found.cost.seconds <= 18.0


def test_no_time_at_all_still_gives_a_frontier(reference: ReferenceStates) -> None:
    bounds = SearchBounds(10_000, 0.0, 0, 8)
    result = search(DECODER, reference, TABLE, 60, bounds, lambda: None, lambda *_: None)
    assert result.cost.evaluations == 1
    assert len(result.frontier) == 1


def test_the_largest_seed_serves_all_rounds(reference: ReferenceStates) -> None:
    some = evaluator(reference, 60)
    some.rate(SubLayerPlan.of(8, {0}), "start")
    optimise(some, seed=2**32 - 1)
    assert len(some.rated) > 20


def test_every_few_rows_are_some_of_each_group(reference: ReferenceStates) -> None:
    longest = max(group.end - group.begin for group in reference.groups)
    for step in (1, 3, 2 * longest, 100 * longest):
        picked = reference.every(step)
        assert {id(group.cache) for group in picked.groups} == {id(group.cache) for group in reference.groups}
        assert len(picked) >= len(reference) // step


@pytest.mark.parametrize("method", ["both", "knapsack"])
@pytest.mark.parametrize("layers", [1, 2])
def test_models_of_one_or_two_layers(layers: int, method: SearchMethod) -> None:
    decoder = Decoder(tiny_model("llama", num_hidden_layers=layers))
    own = referenced(decoder, [[1, 2, 3]], 9)
    bounds = SearchBounds(12, float("inf"), 0, 8, method)
    result = search(decoder, own, latency_table(layers), 20, bounds, lambda: None, lambda *_: None)
    assert all(entry.mask.strip("0") for entry in result.frontier)


@torch.no_grad()
def plant_pairs(
    model: PreTrainedModel, pairs: int, strength: float, epsilon: float = 0.02, seed: int = 0
) -> tuple[PreTrainedModel, SubLayerPlan]:
    """Plant pairs of weak layers: one's MLP adds a vector of `strength` times the state's size, the other's removes it.

    So a dynamic programme that compares states after every sub-layer never skips the first. Returns the model with the
    mask of all planted layers. The given model gets biases of zero in its MLPs.
    """
    layers = model.config.num_hidden_layers
    picker = random.Random(seed)
    firsts = [source + 1 + 2 * number for number, source in enumerate(sorted(picker.sample(range(layers), pairs)))]
    model.config.mlp_bias = True
    add_biases(model)
    planted, weak = plant_at(model, epsilon, {first + by for first in firsts for by in (0, 1)})
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(model.config.vocab_size, (1, 64), generator=generator)
    states = planted(ids, output_hidden_states=True).hidden_states
    for first in firsts:
        direction = torch.randn(model.config.hidden_size, generator=generator)
        size = strength * float(states[first][0].norm(dim=-1).median())
        added = size * direction / direction.norm()
        planted.model.layers[first].mlp.down_proj.bias.add_(added)
        planted.model.layers[first + 1].mlp.down_proj.bias.sub_(added)
    return planted, weak


@pytest.fixture(scope="module")
def pairs() -> tuple[Decoder, ReferenceStates, SubLayerPlan]:
    """A model with four pairs of layers whose MLPs cancel."""
    model, weak = plant_pairs(tiny_model("llama-biases", seed=6, max_position_embeddings=256), 4, 1.0)
    decoder = Decoder(model)
    return decoder, referenced(decoder, FOUR, 33), weak


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


def test_a_search_by_the_clock_ends_at_its_deadline_and_rates_the_fastest(
    pairs: tuple[Decoder, ReferenceStates, SubLayerPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mask takes a minute of four and a half. A variable skips its sub-layer from one half on."""
    now, masks = [0.0], list[SubLayerPlan]()

    def timed(decoder: Decoder, prompts: Sequence[list[int]], mask: SubLayerPlan) -> float:
        now[0] += 60.0
        masks.append(mask)
        return float(len(list(mask)))

    monkeypatch.setattr("ssd_compiler.search.self_sd.tokens_per_second", timed)
    monkeypatch.setattr("ssd_compiler.search.self_sd.KEPT", 2)
    for module in ("search.search", "search.evaluate", "search.self_sd"):
        monkeypatch.setattr(f"ssd_compiler.{module}.perf_counter", lambda: now[0])
    decoder, own, _ = pairs
    bounds = SearchBounds(1000, 270.0, 0, 8, "self-sd")
    table = latency_table(decoder.shape.num_layers, per_token=1e-6)
    found = search(decoder, own, table, 60, bounds, lambda: None, lambda *_: None, [[1, 2]])
    assert found.cost.evaluations == 5
    assert found.cost.seconds == 300.0
    skipped = sorted(len(list(mask)) for mask in masks)
    assert len(masks[0]) / 4 < skipped[0] < skipped[-1] < 3 * len(masks[0]) / 4
    rated = [SubLayerPlan.from_hex(text, decoder.shape.num_layers) for text, *_ in found.cost.rated]
    assert [len(list(mask)) for mask in rated] == skipped[:-3:-1]


# With light copies of the weights


@pytest.fixture(scope="module")
def lit() -> tuple[Decoder, ReferenceStates]:
    decoder = Decoder(MODEL)
    decoder.lighten("auto")
    return decoder, referenced(decoder, FOUR, 33)


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
    alone = [speedups[mask.hex()] for mask in lit[0].light.masks]
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
    assert found.speedup > 1.1


def test_where_a_frontier_has_room_for_few_masks_the_fastest_of_every_context_and_device_are_among_them() -> None:
    """Long contexts favour masks without attention, and devices without copies those that skip more."""
    table = with_light_costs(latency_table(8, per_context=1e-6), 0.5)
    rated = list[Rated]()
    for mixers, mlps, bits in itertools.product(range(7), range(7), (0, 8)):
        mask = SubLayerPlan.of(8, [*range(0, 2 * mixers, 2), *range(1, 2 * mlps, 2)]).lightened(bits)
        acceptance = profile(0.98 - 0.02 * mixers - 0.03 * mlps - 0.01 * bool(bits), tokens=300)
        option = CostModel(table).best_option([Entry(mask.hex(), mask, acceptance)], 60)
        assert option is not None
        rated.append(Rated(mask, "x", option, (), option.speedup))
    chosen = select_frontier(rated, table, 60, 2048)
    assert len(chosen) == FRONTIER_ENTRIES
    for latency, context in ((table, 60), (replace(table, light={}), 60), (table, 128), (table, 512), (table, 2048)):
        best = [
            CostModel(latency).best_option([each.option.entry for each in some], context) for some in (chosen, rated)
        ]
        assert best[0] == best[1]
