"""The parallel estimate of a mask's acceptance is what real drafting does."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bench.fixtures.planted import plant
from ssd_compiler.calibrate import continue_prompts, reference_states, samples_of
from ssd_profiles.mask import SubLayerPlan
from ssd_runtime.drafting.masked import Masked
from ssd_runtime.model.batch import Batch
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.model.runner import ModelRunner
from ssd_runtime.search.replay import ReferenceStates, replay_mask
from ssd_runtime.sequence.session import Session
from tests.models import VARIANTS, tiny_model

BLOCK = 4
MODEL, WEAK = plant(tiny_model("qwen2", seed=2, max_position_embeddings=256), 0.1, 4)
DECODER = Decoder(MODEL)


def references(decoder: Decoder = DECODER) -> tuple[list[list[int]], ReferenceStates]:
    found = continue_prompts(decoder, [[1, 2, 3], [1, 2, 9, 8, 7]], 41, frozenset(), lambda: None)
    samples = samples_of(found, "test")
    return [sample.prompt + sample.continuation for sample in samples], reference_states(decoder, samples)


@pytest.mark.parametrize("mask", [WEAK, SubLayerPlan.of(8, {5, 9}), SubLayerPlan.of(8), SubLayerPlan.of(8, range(16))])
def test_the_parallel_pass_equals_drafting_from_every_block(mask: SubLayerPlan) -> None:
    assert_drafted_as(DECODER, mask)


@pytest.mark.parametrize("variant", ["mistral-sliding", "gemma2", "gemma3", "olmo2", "granite", "smollm3-sliding"])
def test_it_does_in_every_kind_of_layer(variant: str) -> None:
    assert_drafted_as(Decoder(tiny_model(variant, seed=6)), SubLayerPlan.of(4, {3, 4}))


@pytest.mark.parametrize("variant", VARIANTS)
@torch.inference_mode()
def test_a_variant_sees_what_its_row_would_see(variant: str) -> None:
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


@torch.inference_mode()
def test_skipping_nothing_is_always_right() -> None:
    _, reference = references()
    assert all(trace.matches.all() for trace in replay_mask(DECODER, reference, SubLayerPlan.of(8), BLOCK))


def test_head_and_every_keep_rows_with_their_positions() -> None:
    _, reference = references()
    assert len(reference.head(1)) == len(reference.groups[0])
    few = reference.every(7)
    for group in few.groups:
        assert len(group) == 1
        row = group.start - reference.groups[0].start
        matching = [g.begin + group.start - g.start for g in reference.groups if group.cache is g.cache]
        assert row is not None
        assert torch.equal(few.states[-1][group.begin], reference.states[-1][matching[0]])
        assert few.targets[group.begin] == reference.targets[matching[0]]


def test_evaluating_leaves_committed_keys_alone() -> None:
    _, reference = references()
    before = [g.cache.read(3, 0, g.start + len(g))[0].clone() for g in reference.groups]
    replay_mask(DECODER, reference, SubLayerPlan.of(8, {0, 1}), BLOCK)
    after = [g.cache.read(3, 0, g.start + len(g))[0] for g in reference.groups]
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
