"""Searches for masks: the dynamic programme, and the parallel estimate of what real drafting does."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from bench.fixtures.planted import plant
from ssd_compiler.calibrate import reference_states
from ssd_profiles.mask import SubLayerPlan
from ssd_runtime.drafting.masked import Masked
from ssd_runtime.model.batch.batch import Batch
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.model.runner import ModelRunner
from ssd_runtime.planning.papers.knapsack import KnapsackPlanner
from ssd_runtime.planning.plan import PLAIN, Cycle
from ssd_runtime.planning.settings import KnapsackSettings
from ssd_runtime.search.knapsack import Candidate, searching_knapsack
from ssd_runtime.search.replay import ReferenceStates, replay_mask
from ssd_runtime.search.weights import Weights
from ssd_runtime.sequence.session import Session
from tests.decoding import as_plain
from tests.models import ALIKE, HYBRIDS, SHARING, tiny_model
from tests.references import generated, referenced
from tests.tables import latency_table, with_light_costs

MODEL, WEAK = plant(tiny_model("qwen3", seed=4, max_position_embeddings=256), 0.02, 4)
DECODER = Decoder(MODEL)


@pytest.fixture(scope="module")
def reference() -> ReferenceStates:
    return referenced(DECODER, [[1, 2, 3], [4, 5, 9, 8, 7]], 33)


def search(decoder: Decoder, rows: ReferenceStates, weights: Weights, **options: Any) -> list[Candidate]:
    return ModelRunner(decoder).finish(searching_knapsack(decoder, rows, weights, **options))


@pytest.mark.parametrize("weights", [(1, 1), (1, 3), (5, 2)])
def test_candidates_skip_what_they_say(reference: ReferenceStates, weights: tuple[int, int]) -> None:
    found = search(DECODER, reference, Weights(weights * 8))
    whole = 8 * sum(weights)
    for candidate in found:
        mask = candidate.mask
        skipped = mask.mixers_skipped * weights[0] + mask.mlps_skipped * weights[1]
        assert skipped == candidate.skipped_weight
        assert candidate.skipped_weight <= whole / 2
    assert len({candidate.skipped_weight for candidate in found}) == len(found)
    assert found[0].mask == SubLayerPlan.of(8)
    assert found[0].cosine == pytest.approx(1.0, abs=1e-5)
    assert found[0].token_agreement == 1.0


def test_the_planted_layers_are_found(reference: ReferenceStates) -> None:
    found = {c.skipped_weight: c.mask for c in search(DECODER, reference, Weights((1, 1) * 8))}
    assert found[8] == WEAK


def test_similarity_threshold_prunes(reference: ReferenceStates) -> None:
    everything = search(DECODER, reference, Weights((1, 1) * 8), threshold=-1.0, budget=1.0)
    pruned = search(DECODER, reference, Weights((1, 1) * 8), threshold=0.9, budget=1.0)
    assert len(everything) == 17
    assert 1 <= len(pruned) < len(everything)


@torch.inference_mode()
def searched(decoder: Decoder, rows: ReferenceStates, weights: Weights, **options: Any) -> list[Candidate]:
    """Candidates, each of whose states is the masked model's own, row by row."""
    batch = Batch.of([decoder.batches.variants(group.cache, group.start, len(group)) for group in rows.groups])
    found = search(decoder, rows, weights, threshold=-1.0, **options)
    for candidate in found:
        x = decoder.run(rows.states[0], batch, candidate.mask)
        final, target = decoder.head.norm(x), decoder.head.norm(rows.states[-1])
        assert torch.cosine_similarity(final, target, -1).mean() == pytest.approx(candidate.cosine, abs=1e-4)
    return found


@pytest.mark.parametrize("variant", ["qwen3", *SHARING])
def test_a_states_cosine_is_that_of_running_its_mask(variant: str) -> None:
    decoder = Decoder(tiny_model(variant, seed=6))
    assert searched(decoder, references(decoder)[1].every(3), Weights((1, 1) * 4))


FINE = Weights.fine(with_light_costs(latency_table(8), 0.4, (8, 4)), 100, [(8, 4)] * 17)


def saved(mask: SubLayerPlan) -> int:
    """The weight that a mask saves."""
    precisions = [dict(FINE.options(index)) for index in range(16)]
    return sum(FINE.items[i] if skip else precisions[i][mask.bits_of(i)] for i, skip in enumerate(mask.skipped))


def test_precisions_are_a_multiple_choice(reference: ReferenceStates) -> None:
    """Each candidate saves what it says, its state is that of running its mask, and all precisions are used."""
    decoder, used = Decoder(MODEL), set[int]()
    decoder.lighten("auto")
    found = searched(decoder, reference.every(3), FINE, budget=0.9, most=12)
    for candidate in found:
        mask = candidate.mask
        assert saved(mask) == candidate.skipped_weight
        assert candidate.skipped_weight <= 0.9 * sum(FINE.items)
        used |= {-1 if skip else mask.bits_of(i) for i, skip in enumerate(mask.skipped)}
    assert used == {-1, 0, 8, 4}
    assert {candidate.mask.head_bits for candidate in found} == {8}


def test_weights_are_rounded_latency_ratios() -> None:
    table = latency_table(4, mlp=1.1e-3)
    ratio = table.mlp_seconds(1) / table.mixer_seconds(0, 1, "full")
    assert Weights.of(table, 0) == Weights((1, round(ratio)) * 4)
    long = Weights.of(latency_table(4, mlp=1e-5, per_context=1e-6), 5000)
    attention, mlp = long.items[:2]
    assert mlp == 1
    assert attention > 50


@pytest.mark.parametrize("confidence", [0.0, 0.7])
def test_on_the_fly_it_finds_the_planted_layers_and_changes_nothing(confidence: float) -> None:
    settings = KnapsackSettings(refresh=6, window=3, share=1.0, confidence=confidence)
    planner = KnapsackPlanner(latency_table(8, per_token=1e-6), settings)
    got = as_plain(DECODER, [7, 7, 9], planner, 120)
    masks = {cycle.plan.mask for cycle in got.cycles if cycle.plan.mask}
    assert len(masks) >= 1
    assert got.target_forwards < 119
    assert max(mask.jaccard(WEAK) for mask in masks) >= 0.6


@pytest.mark.parametrize("agreement", [0.1, 0.8, 0.99])
def test_the_plan_has_the_length_and_the_rate_of_the_highest_tpt(agreement: float) -> None:
    """KnapSpec eq. 4 with the time measured for the verification's rows, which are one more than the drafts."""
    table, mask = latency_table(8, per_token=1e-5), SubLayerPlan.of(8, range(2, 15))
    candidates = [Candidate(SubLayerPlan.of(8), 0, 1.0, 1.0), Candidate(mask, 8, 0.9, agreement)]
    plan = KnapsackPlanner(table, KnapsackSettings(confidence=0.0))._best(candidates, 500)
    until = KnapsackPlanner(table, KnapsackSettings(confidence=0.7))._best(candidates, 500)
    assert until.mask == plan.mask
    draft = table.step_seconds(500, 1, mask)
    rates = {
        length: sum(agreement**i for i in range(length + 1)) / (length * draft + table.step_seconds(500, length + 1))
        for length in range(1, 11)
    }
    best = max(rates, key=lambda length: rates[length])
    if rates[best] > 1.0 / table.step_seconds(500):
        assert (plan.mask, plan.draft_length, until.draft_length) == (mask, best, 10)
        assert f" {rates[best]:.1f} tokens/s" in plan.reason
    else:
        assert plan.mask is None


@pytest.mark.parametrize("states", [0, 2])
@pytest.mark.parametrize("refresh", [16, 32])
def test_a_search_looks_at_as_many_tokens_as_its_share_of_the_time_allows(states: int, refresh: int) -> None:
    table = latency_table(8, per_token=2e-4)
    planner = KnapsackPlanner(table, KnapsackSettings(refresh=refresh, states=states))
    for _ in range(5):
        kept = [torch.zeros(11, 1)] * 17
        planner.observe(Cycle(PLAIN, 500, 0, 0, [1] * 11, 1, draft_seconds=0.1, verify_seconds=0.1), kept)
    weights = Weights.of(table, 500)
    rows = planner._affordable(weights, 500)

    def seconds(rows: int) -> float:
        """A search's time; without a limit, half of the budgets up to the heaviest are carried on average."""
        carried = rows * (states or 0.5 * sum(weights.items) / 2)
        return sum(table.sublayer_seconds(500, carried)) + table.head_seconds(carried)

    assert 4 < rows < 55
    assert seconds(rows) <= 0.05 * refresh * 0.2 < seconds(rows + 1)


BLOCK = 4
REPLAY_MODEL, REPLAY_WEAK = plant(tiny_model("qwen2", seed=2, max_position_embeddings=256), 0.1, 4)
REPLAY_DECODER = Decoder(REPLAY_MODEL)


@cache
def references(decoder: Decoder = REPLAY_DECODER) -> tuple[list[list[int]], ReferenceStates]:
    samples = generated(decoder, [[1, 2, 3], [1, 2, 9, 8, 7]], 41)
    return [sample.prompt + sample.continuation for sample in samples], reference_states(decoder, samples)


@pytest.mark.parametrize(
    "mask", [REPLAY_WEAK, SubLayerPlan.of(8, {5, 9}), SubLayerPlan.of(8), SubLayerPlan.of(8, range(16))]
)
def test_the_parallel_pass_equals_drafting_from_every_block(mask: SubLayerPlan) -> None:
    assert_drafted_as(REPLAY_DECODER, mask)


@pytest.mark.parametrize(
    "variant",
    [
        *("phi3-longrope", "gemma2", "gemma3", "smollm3-sliding", "gpt-oss-sliding", "granitemoe"),
        *(name for name in (*HYBRIDS, *SHARING) if name not in ALIKE),
    ],
)
@torch.inference_mode()
def test_the_pass_sees_in_every_kind_of_layer_what_its_row_would_see(variant: str) -> None:
    """Variants that differ in nothing are the full model's rows, whatever the variants beside them are."""
    decoder = Decoder(tiny_model(variant, seed=6))
    _, reference = references(decoder)
    batch = Batch.of([decoder.batches.variants(g.cache, g.start, len(g)).times(3) for g in reference.groups])
    kept = [g.cache.read(layer, 0, g.start + len(g))[0].clone() for g in reference.groups for layer in range(4)]
    for layer in range(4):
        x = reference.states[2 * layer]
        beside = torch.stack([torch.randn_like(x), x, torch.randn_like(x)], 1).flatten(0, 1)
        got = decoder.run(beside, batch, first=2 * layer, last=2 * layer + 1).view(len(x), 3, -1)
        torch.testing.assert_close(got[:, 1], reference.states[2 * layer + 1], atol=2e-4, rtol=1e-3)
    read = [g.cache.read(layer, 0, g.start + len(g))[0] for g in reference.groups for layer in range(4)]
    assert all(torch.equal(a, b) for a, b in zip(kept, read, strict=True)), "nothing is written"
    if decoder.rope_switch is None:  # drafts end there, and replays do not
        skipped = {0, 2, 7} if variant in SHARING else {3, 4}  # layers whose keys others read
        assert_drafted_as(decoder, SubLayerPlan.of(4, skipped))


@torch.inference_mode()
def assert_drafted_as(decoder: Decoder, mask: SubLayerPlan) -> None:
    texts, reference = references(decoder)
    for text, group, trace in zip(texts, reference.groups, replay_mask(decoder, reference, mask, BLOCK), strict=True):
        session = Session(decoder)
        session.prefill(text[: group.start])
        for begin in range(0, len(group) - BLOCK, BLOCK):
            wanted = text[group.start + begin : group.start + begin + BLOCK + 1]
            session.pending = wanted[0]
            drafted = ModelRunner(decoder).finish(Masked(mask).drafting(session, BLOCK)).tokens
            right = [a == b for a, b in zip(drafted, wanted[1:], strict=True)]
            until = right.index(False) + 1 if False in right else BLOCK
            # Behind a wrong token real drafting goes on from it, the pass from the right one.
            assert trace.matches[begin : begin + until].tolist() == right[:until]
            session.forward(wanted[:-1])
            session.commit(wanted[:-1])
