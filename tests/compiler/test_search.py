"""A search finds planted layers, within its bounds and reproducibly."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from bench.fixtures.planted import add_biases, plant, plant_at
from ssd_compiler.search.bayesian import optimise
from ssd_compiler.search.evaluate import Evaluator
from ssd_compiler.search.search import SearchBounds, SearchResult, search
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
from tests.tables import latency_table, with_light_costs

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
