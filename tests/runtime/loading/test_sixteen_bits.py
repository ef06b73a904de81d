"""A checkpoint in 16 bits decodes as its fp32 form does, from half of the memory."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from ssd_artifacts.safetensors_header import StoredTensor, read_header
from ssd_profiles.mask import SubLayerPlan
from ssd_runtime.engine.loop import generate
from ssd_runtime.engine.output.output import Limits
from ssd_runtime.loading.checkpoints.sixteen_bits import dtype_to_keep, keep_numbers
from ssd_runtime.loading.checks.parity import require_faithful
from ssd_runtime.loading.models import load_model
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.model.family.families import family_of
from ssd_runtime.planning.plan import ConstantPlanner, PlainPlanner, Plan
from ssd_runtime.sequence.session import Session
from ssd_runtime.weights.kernels.formats import SIXTEEN
from ssd_runtime.weights.native.library import library
from ssd_runtime.weights.packed_linear import PackedEmbedding, PackedLinear
from tests.models import VARIANTS, tiny_model

pytestmark = pytest.mark.skipif(library() is None, reason="needs AVX2 and a C compiler")
IDS = torch.arange(1, 60)[None]
NAMES = {torch.bfloat16: "BF16", torch.float16: "F16"}


@torch.no_grad()
def rounded_pair(variant: str, dtype: torch.dtype, vocab_size: int = 96) -> tuple[torch.nn.Module, torch.nn.Module]:
    """A model in fp32 whose numbers are all numbers of `dtype`, and the same model in that."""
    inner = {"moe_intermediate_size": 32} if "moe_intermediate_size" in VARIANTS[variant][1] else {}
    truth = tiny_model(variant, seed=5, vocab_size=vocab_size, intermediate_size=96, **inner)
    for tensor in truth.state_dict().values():
        tensor.copy_(tensor.to(dtype))
    return truth, copy.deepcopy(truth).to(dtype)


@pytest.mark.parametrize("variant", list(VARIANTS))
@torch.inference_mode()
def test_every_family_computes_what_it_does_in_fp32(variant: str) -> None:
    truth, stored = rounded_pair(variant, torch.bfloat16)
    expected = truth(IDS).logits
    kept = keep_numbers(stored)
    assert kept.dtype == torch.float32
    packed = [name for name, module in kept.named_modules() if type(module) is PackedLinear]
    assert any(".experts." in name for name in packed) == (family_of(truth.config).router is not None)
    # Random delta nets magnify the order of sums.
    most = 2e-3 if variant.startswith(("qwen3.5", "qwen3-next")) else 1e-4
    torch.testing.assert_close(kept(IDS).logits, expected, rtol=most, atol=most)
    decoder = Decoder(kept)
    require_faithful(decoder)
    session = Session(decoder)
    session.prefill(IDS[0, :40].tolist())
    got = decoder.logits(session.forward(IDS[0, 40:].tolist()))
    most = max(most, 1e-3)
    torch.testing.assert_close(got, expected[0, 40:], rtol=most, atol=most)


@torch.inference_mode()
def test_a_head_of_any_number_of_tokens_is_kept() -> None:
    """Its light copies, too."""
    truth, stored = rounded_pair("llama", torch.bfloat16, vocab_size=93)
    expected = truth(IDS).logits
    kept = keep_numbers(stored)
    assert type(kept.lm_head) is PackedLinear
    torch.testing.assert_close(kept(IDS).logits, expected, rtol=1e-4, atol=1e-4)
    decoder, limits = Decoder(kept), Limits(40)
    plain = generate(Session(decoder), [3, 1, 4], PlainPlanner(), limits).token_ids
    for bits in ("8", "4"):
        decoder.lighten(bits)
        assert len(set(decoder.light.kernels.split(", "))) == 1, "one kind serves all"
        plan = Plan.masked("test", decoder.light.mask, 5)
        assert generate(Session(decoder), [3, 1, 4], ConstantPlanner(plan), limits).token_ids == plain


@pytest.mark.parametrize("dtype", list(SIXTEEN))
def test_a_folder_keeps_its_bits_unless_fp32_is_asked_for(folder: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    path = tmp_path / "model"
    AutoModelForCausalLM.from_pretrained(folder).to(dtype).save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).write_bytes((folder / name).read_bytes())
    kept, wide = load_model(str(path), "cpu"), load_model(str(path), "cpu", "fp32")
    assert kept.fingerprint() == wide.fingerprint(), "a bundle belongs to both"
    kernels = {module.kernel for module in kept.model.modules() if type(module) is PackedLinear}
    assert {kernel.name.removeprefix(library().instructions) for kernel in kernels} == {NAMES[dtype]}
    rows = {kernel: -(-kernel.out_features // 16) * 16 for kernel in kernels}
    assert sum(kernel.nbytes for kernel in kernels) == 2 * sum(count * x.in_features for x, count in rows.items())
    assert type(kept.model.model.embed_tokens) is PackedEmbedding
    assert not any(type(module) is PackedLinear for module in wide.model.modules())
    ids = kept.encode([("user", "How many apples has Ada?")])
    limits = Limits(40)
    expected = generate(Session(Decoder(wide.model)), ids, PlainPlanner(), limits).token_ids
    decoder = Decoder(kept.model)
    assert generate(Session(decoder), ids, PlainPlanner(), limits).token_ids == expected
    decoder.lighten("8")
    assert decoder.light.bits == (8,)
    for mask in (decoder.light.mask, SubLayerPlan.of(decoder.shape.num_layers, {3, 4})):
        plan = Plan.masked("test", mask, 5)
        assert generate(Session(decoder), ids, ConstantPlanner(plan), limits).token_ids == expected


def test_what_would_lose_bits_is_not_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = AutoModelForCausalLM.from_pretrained(folder).config
    sixteen = StoredTensor("BF16", (2, 2), 0, 8)
    assert dtype_to_keep({"a": sixteen, "b": sixteen}, config) == torch.bfloat16
    assert dtype_to_keep({"a": sixteen, "b": StoredTensor("F32", (2,), 0, 8)}, config) is None
    assert dtype_to_keep(read_header(folder / "model.safetensors"), config) is None, "it is fp32"
    monkeypatch.setattr("ssd_runtime.loading.checkpoints.sixteen_bits.library", lambda: None)
    assert dtype_to_keep({"a": sixteen}, config) is None
