from __future__ import annotations

import pytest
import torch

from bench.fixtures.planted import plant
from ssd_compiler.calibrate import continue_prompts, reference_states, samples_of
from ssd_profiles.mask import SubLayerPlan
from ssd_runtime.engine.loop import generate
from ssd_runtime.engine.output.output import Limits
from ssd_runtime.model.batch import Batch
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.planning.papers.knapsack import KnapsackPlanner
from ssd_runtime.planning.plan import PlainPlanner
from ssd_runtime.planning.settings import KnapsackSettings
from ssd_runtime.search.knapsack import Candidate, Weights, _thinned, search_knapsack
from ssd_runtime.search.replay import ReferenceStates
from ssd_runtime.sequence.session import Session
from tests.models import tiny_model
from tests.tables import latency_table, with_light_costs

MODEL, WEAK = plant(tiny_model("qwen3", seed=4, max_position_embeddings=256), 0.02, 4)
DECODER = Decoder(MODEL)


@pytest.fixture(scope="module")
def reference() -> ReferenceStates:
    found = continue_prompts(DECODER, [[1, 2, 3], [4, 5, 9, 8, 7]], 33, frozenset(), lambda: None)
    return reference_states(DECODER, samples_of(found, "test"))


@pytest.mark.parametrize("weights", [(1, 1), (1, 3), (5, 2)])
def test_candidates_skip_what_they_say(reference: ReferenceStates, weights: tuple[int, int]) -> None:
    found = search_knapsack(DECODER, reference, Weights(weights * 8))
    whole = 8 * sum(weights)
    for candidate in found:
        mask = candidate.mask
        skipped = mask.attention_skipped * weights[0] + mask.mlp_skipped * weights[1]
        assert skipped == candidate.skipped_weight
        assert candidate.skipped_weight <= whole / 2
    assert len({candidate.skipped_weight for candidate in found}) == len(found)
    assert found[0].mask == SubLayerPlan.of(8)
    assert found[0].cosine == pytest.approx(1.0, abs=1e-5)
    assert found[0].token_agreement == 1.0


def test_the_planted_layers_are_found(reference: ReferenceStates) -> None:
    found = {c.skipped_weight: c.mask for c in search_knapsack(DECODER, reference, Weights((1, 1) * 8))}
    assert found[8] == WEAK


def test_similarity_threshold_prunes(reference: ReferenceStates) -> None:
    everything = search_knapsack(DECODER, reference, Weights((1, 1) * 8), threshold=-1.0, budget=1.0)
    pruned = search_knapsack(DECODER, reference, Weights((1, 1) * 8), threshold=0.9, budget=1.0)
    assert len(everything) == 17
    assert 1 <= len(pruned) < len(everything)


@torch.inference_mode()
def test_a_states_cosine_is_that_of_running_its_mask(reference: ReferenceStates) -> None:
    """The state that the programme carries is the masked model's own, row by row."""
    rows = reference.every(3)
    batch = Batch.of([DECODER.batches.variants(group.cache, group.start, len(group)) for group in rows.groups])
    for candidate in search_knapsack(DECODER, rows, Weights((1, 1) * 8)):
        x = DECODER.run(rows.states[0], batch, candidate.mask)
        final, target = DECODER.norm(x), DECODER.norm(rows.states[-1])
        assert torch.cosine_similarity(final, target, -1).mean() == pytest.approx(candidate.cosine, abs=1e-4)


@pytest.fixture(scope="module")
def lit() -> Decoder:
    decoder = Decoder(MODEL)
    decoder.lighten("auto", [SubLayerPlan.of(8).lightened(4)])
    return decoder


FINE = Weights.fine(with_light_costs(latency_table(8), 0.4, (8, 4)), 100, [(8, 4)] * 17)


def saved(mask: SubLayerPlan) -> int:
    """The weight that a mask saves."""
    precisions = [dict(FINE.options(index)) for index in range(16)]
    return sum(FINE.items[i] if skip else precisions[i][mask.bits_of(i)] for i, skip in enumerate(mask.skipped))


@torch.inference_mode()
def test_precisions_are_a_multiple_choice(reference: ReferenceStates, lit: Decoder) -> None:
    """Each candidate saves what it says, its state is that of running its mask, and all precisions are used."""
    rows = reference.every(3)
    batch = Batch.of([lit.batches.variants(group.cache, group.start, len(group)) for group in rows.groups])
    found = search_knapsack(lit, rows, FINE, threshold=-1.0, budget=0.9, most=12)
    used = set[int]()
    for candidate in found:
        mask = candidate.mask
        assert saved(mask) == candidate.skipped_weight
        assert candidate.skipped_weight <= 0.9 * sum(FINE.items)
        final, target = lit.norm(lit.run(rows.states[0], batch, mask)), lit.norm(rows.states[-1])
        assert torch.cosine_similarity(final, target, -1).mean() == pytest.approx(candidate.cosine, abs=1e-4)
        used |= {-1 if skip else mask.bits_of(i) for i, skip in enumerate(mask.skipped)}
    assert used == {-1, 0, 8, 4}
    assert {candidate.mask.head_bits for candidate in found} == {8}


def test_the_planted_layers_are_skipped_and_the_others_lighter(reference: ReferenceStates, lit: Decoder) -> None:
    """Sub-layers that cost nothing to skip are skipped before real ones."""
    found = search_knapsack(lit, reference.every(3), FINE, threshold=-1.0, budget=0.9)
    light = WEAK.lightened(8)
    [best] = [candidate for candidate in found if candidate.skipped_weight == saved(light)]
    assert set(best.mask) == set(WEAK)


def test_units_are_fine_enough_for_a_few_percent() -> None:
    table = with_light_costs(latency_table(4), 0.1, (8,))
    weights = Weights.fine(table, 100, [(8,)] * 9)
    assert Weights.of(table, 100).items == (1, 2) * 4
    for item, weight in enumerate(weights.items):
        [(bits, gain)] = weights.options(item)[1:]
        assert bits == 8
        assert gain == pytest.approx(0.1 * weight, abs=0.5)
        assert gain >= 1


def test_weights_are_rounded_latency_ratios() -> None:
    table = latency_table(4, mlp=1.1e-3)
    ratio = table.mlp_seconds(1) / table.attention_seconds(0, 1, "full")
    assert Weights.of(table, 0) == Weights((1, round(ratio)) * 4)
    long = Weights.of(latency_table(4, mlp=1e-5, per_context=1e-6), 5000)
    attention, mlp = long.items[:2]
    assert mlp == 1
    assert attention > 50


@pytest.mark.parametrize("confidence", [0.0, 0.7])
def test_on_the_fly_it_finds_the_planted_layers_and_changes_nothing(confidence: float) -> None:
    settings = KnapsackSettings(refresh=6, window=3, confidence=confidence)
    planner = KnapsackPlanner(latency_table(8, per_token=1e-6), settings)
    got = generate(Session(DECODER), [7, 7, 9], planner, Limits(120))
    assert got.token_ids == generate(Session(DECODER), [7, 7, 9], PlainPlanner(), Limits(120)).token_ids
    masks = {cycle.plan.mask for cycle in got.cycles if cycle.plan.mask}
    assert len(masks) >= 1
    assert got.target_forwards < 119
    assert max(mask.jaccard(WEAK) for mask in masks) >= 0.6


def test_without_early_stop_drafts_are_as_long_as_verifying_them_pays() -> None:
    """The length of most tokens a second, by what the table says of verifying so many; else the longest (D)."""
    lengths: dict[float, list[int]] = {0.0: [], 0.7: []}
    for confidence, found in lengths.items():
        for per_token in (1e-6, 5e-5, 7e-5):
            planner = KnapsackPlanner(latency_table(8, per_token=per_token), KnapsackSettings(confidence=confidence))
            plan = planner._best([Candidate(WEAK, 8, 0.99, 0.99)], 100)
            found.append(plan.draft_length)
    assert lengths[0.0][0] > lengths[0.0][1] > lengths[0.0][2] > 0
    assert lengths[0.7] == [KnapsackSettings().max_draft] * 3


@pytest.mark.parametrize("most", [4, 6])
def test_few_states_find_the_planted_layers_too(reference: ReferenceStates, most: int) -> None:
    """Skipping more than weak layers begins to cost there, so that state is kept however few are."""
    found = search_knapsack(DECODER, reference, Weights((1, 1) * 8), most=most)
    assert 2 <= len(found) <= most
    assert max(found, key=lambda candidate: candidate.skipped_weight * (candidate.cosine > 0.98)).mask == WEAK
    for candidate in found:
        assert len(list(candidate.mask)) == candidate.skipped_weight
    assert search_knapsack(DECODER, reference, Weights((1, 1) * 8), most=99) == search_knapsack(
        DECODER, reference, Weights((1, 1) * 8)
    )


def test_thinning_keeps_the_ends_and_where_skipping_more_begins_to_cost() -> None:
    cosines = {weight: 0.999 - 0.001 * weight for weight in range(6)}
    cosines |= {weight: 0.9 - 0.05 * weight for weight in range(6, 12)}
    assert _thinned(cosines, 3) == [0, 5, 11]
    for most in range(2, 13):
        kept = _thinned(cosines, most)
        assert len(kept) == most
        assert kept == sorted(kept)
        assert {0, 11} <= set(kept)
        assert most < 3 or 5 in kept
    assert _thinned({0: 1.0, 1: 0.5}, 9) == [0, 1]
