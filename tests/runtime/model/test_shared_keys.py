"""Layers that read another layer's keys, and sub-layers that do something though a draft skips them (Gemma-4)."""

from __future__ import annotations

import copy

import pytest
import torch

from ssd_profiles.mask import SubLayerPlan
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.sequence.session import Session
from tests.models import SHARING, VARIANTS, tiny_model

GEMMA4 = [name for name, (kind, _) in VARIANTS.items() if kind == "gemma4_text"]
IDS = list(range(3, 43))


@pytest.mark.parametrize("variant", GEMMA4)
@torch.no_grad()
def test_a_masked_model_is_one_whose_skipped_blocks_add_nothing(variant: str) -> None:
    """Others still read the keys of a skipped attention, and a layer's factor holds without its MLP."""
    model = tiny_model(variant, seed=3)
    decoder = Decoder(model)
    for skipped in ({0}, {1}, {2, 5}, {0, 2, 3}, {4, 7}, set(range(8))):
        other = copy.deepcopy(model)
        for index in skipped:
            layer = other.model.layers[index // 2]
            if index % 2 == 0:
                layer.self_attn.o_proj.weight.zero_()
                continue
            layer.mlp.down_proj.weight.zero_()
            if hasattr(layer, "experts"):
                layer.experts.down_proj.zero_()
            if hasattr(layer, "per_layer_projection"):
                layer.per_layer_projection.weight.zero_()
        session, mask = Session(decoder), SubLayerPlan.of(4, skipped)
        got = [decoder.logits(session.forward(IDS[:30], mask))]
        session.commit(IDS[:30])
        got += [decoder.logits(session.forward([token], mask, ahead)) for ahead, token in enumerate(IDS[30:])]
        expected = other(torch.tensor([IDS])).logits[0]
        torch.testing.assert_close(torch.cat(got), expected, atol=1e-4 * float(expected.abs().max()), rtol=0)


@pytest.mark.parametrize("variant", SHARING)
def test_layers_that_share_keys_take_no_memory_for_any(variant: str) -> None:
    layout = Decoder(tiny_model(variant)).kv_layout
    assert layout.keyed == [0, 1]
    assert layout.bytes_per_slot == layout.layer_bytes(0) + layout.layer_bytes(1)
    assert layout.layer_bytes(1) == 2 * layout.layer_bytes(0), "heads of layers without a window are twice as large"
