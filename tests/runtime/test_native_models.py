"""Models whose tensors have other shapes than their architecture says never reach our own kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from torch import nn
from transformers import PreTrainedModel

from ssd_profiles.errors import UserError
from ssd_profiles.mask import SubLayerPlan
from ssd_runtime.loading.gguf.config import gguf_config
from ssd_runtime.loading.gguf.models import packed_model
from ssd_runtime.model.batch.batch import Batch
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.model.sublayers.native_run import NativeRun
from ssd_runtime.weights.gguf.index import GgufIndex
from ssd_runtime.weights.kernels.native import Native
from tests.gguf_files import DELTA_NETS, HYBRID_SIZES, SIZES, save_gguf
from tests.models import tiny_model

PROJECTIONS = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
NORMS = ["input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"]

MIXERS: dict[str, dict[str, Any]] = {
    "lfm2": {},
    "qwen3.5": DELTA_NETS,
    **{name: HYBRID_SIZES[name] for name in ("granite-hybrid", "falcon-h1")},
}
CHANGES = [(16, 0), (-8, 0), (0, -32)]
CASES = [(name, change) for name in PROJECTIONS for change in CHANGES]
CASES += [(name, (rows, 0)) for name in NORMS for rows in (8, -8)]


def replaced(name: str, rows: int, columns: int) -> PreTrainedModel:
    """A tiny model of which one projection has more outputs and columns, or one norm more numbers."""
    model = tiny_model("qwen3", **SIZES)
    module = model.get_submodule(f"model.layers.1.{name}")
    if isinstance(module, nn.Linear):
        module.weight = nn.Parameter(torch.randn(module.out_features + rows, module.in_features + columns))
    else:
        module.weight = nn.Parameter(torch.ones(len(module.weight) + rows))
    return model


@pytest.mark.parametrize(("name", "change"), CASES)
def test_a_file_with_a_tensor_of_another_shape_is_refused_before_a_kernel_is_made(
    name: str, change: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Native, "__init__", lambda *args: pytest.fail("a kernel was made"))
    path = tmp_path / "model.gguf"
    save_gguf(path, replaced(name, *change), Type.Q8_0)
    index = GgufIndex.read(path)
    with pytest.raises(UserError, match=r"tensor blk\.1\.\w+\.weight is \[.*\], expected \["):
        packed_model(index, gguf_config(index))


@pytest.mark.parametrize(
    "variant", ["llama", "qwen3", "mistral-sliding", "smollm3", "gemma4-shared-keys", "gemma4-values-are-keys", *MIXERS]
)
@torch.inference_mode()
def test_sublayers_in_one_call_are_those_one_by_one(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With every kind of draft: masks, light copies in two sets of bits, and parts of the model."""
    if not Native.can_serve(32):
        pytest.skip("needs AVX2 and a C compiler")
    decoder = Decoder(tiny_model(variant, **SIZES, **MIXERS.get(variant, HYBRID_SIZES.get(variant, {}))))
    decoder.lighten("8")
    places = 2 * decoder.shape.num_layers
    light = decoder.light.mask
    eights = dict.fromkeys(range(places), 8)
    masks = [light, *(SubLayerPlan.of(len(decoder.layers), skip).lightened(eights) for skip in ({1, 4}, {0, 2, 5}))]

    def states() -> list[torch.Tensor]:
        cache = decoder.new_cache()
        cache.reserve(64)
        found = []
        for slot, rows in ((0, 9), (9, 1), (10, 4)):
            batch = Batch.of([decoder.batches.consecutive(cache, slot, rows)])
            x = decoder.embed(decoder.probe_ids(rows))
            found += [decoder.run(x, batch, mask) for mask in masks]
            found.append(decoder.run(decoder.run(x, batch, light, 0, 3), batch, light, 3))
        return found

    calls, real = list[int](), NativeRun
    monkeypatch.setattr(
        "ssd_runtime.model.sublayers.sublayers.NativeRun", lambda parts: calls.append(len(parts)) or real(parts)
    )
    whole = states()
    assert max(calls) == places + sum(layer.has_ending for layer in decoder.layers)
    monkeypatch.setattr("ssd_runtime.model.sublayers.sublayers.FEW_ROWS", 0)
    assert all(map(torch.equal, whole, states()))


@pytest.mark.parametrize("variant", MIXERS)
@torch.inference_mode()
def test_rows_that_are_timed_run_in_one_call_as_a_steps_do(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not Native.can_serve(32):
        pytest.skip("needs AVX2 and a C compiler")
    decoder = Decoder(tiny_model(variant, **SIZES, **MIXERS[variant]))
    decoder.lighten("8")
    cache, calls, real = decoder.new_cache(), list[int](), NativeRun.__call__
    cache.reserve(64)
    monkeypatch.setattr(NativeRun, "__call__", lambda run, x, *rest: calls.append(len(x)) or real(run, x, *rest))
    for rows in (1, 3):
        x = decoder.embed(decoder.probe_ids(rows))
        decoder.run(x, Batch.of([decoder.batches.timed(cache, 7, rows)]), decoder.light.mask)
    assert calls == [1, 3]
