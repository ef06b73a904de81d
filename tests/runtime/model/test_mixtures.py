"""A mixture's MLP block: rows that do not depend on each other, weights that are not copied, changes that are seen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from ssd_runtime.model.batch.batch import Batch
from ssd_runtime.model.batch.builder import MOST_BY_ROW
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.model.layer.experts import Experts, router_of
from ssd_runtime.profiling.latency import QUERIES, _Bench
from ssd_runtime.profiling.timer import Timer
from ssd_runtime.weights.kernels.native_mlp import Routing
from tests.decoding import assert_as_transformers, logits_of
from tests.gguf_files import quantised_pair
from tests.models import VARIANTS, tiny_model

WIDE = {"hidden_size": 192, "moe_intermediate_size": 672, "head_dim": 48, "num_experts": 8}
"""Sizes at which kernels sum in several blocks."""
PACKED = {"moe_intermediate_size": 64, "num_experts": 8}


def experts_of(decoder: Decoder, layer: int = 1) -> Experts:
    found = decoder.layers[layer].mlp
    assert isinstance(found, Experts)
    return found


def packed(variant: str, kind: Type, folder: Path) -> PreTrainedModel:
    """The model of a variant on packed weights; skips the test if transformers lacks its family."""
    if variant not in VARIANTS:
        pytest.skip("this transformers lacks the family")
    return quantised_pair(folder, variant, kind, **(PACKED if variant == "qwen3-moe" else {}))[0]


@pytest.mark.parametrize("weights", ["fp32", "bf16", "packed"])
@torch.inference_mode()
def test_no_bit_of_a_row_depends_on_the_rows_beside_it(weights: str, tmp_path: Path) -> None:
    dtype = torch.bfloat16 if weights == "bf16" else torch.float32
    if weights == "packed":
        decoder = Decoder(quantised_pair(tmp_path, "qwen3-moe", Type.Q4_0, **PACKED)[0])
    else:
        decoder = Decoder(tiny_model("qwen3-moe", **WIDE).to(dtype), bitwise=True)
    block = experts_of(decoder)
    x = torch.randn(MOST_BY_ROW, decoder.shape.hidden, dtype=dtype)
    x[5:9] = x[5]  # several rows of the same experts
    alone = torch.cat([block(row, row) for row in x.split(1)])
    for rows in (2, 3, 8, MOST_BY_ROW):
        assert torch.equal(torch.cat([block(few, few) for few in x.split(rows)]), alone), rows


ROUTED = ("qwen3-moe", "mixtral", "olmoe", "granitemoe", "gpt-oss-sliding", "lfm2-moe")
"""Families whose routers take the largest of a softmax, or of sigmoids."""
SHARED = ("qwen3.5-moe", "granite-shared-expert", "granite-hybrid-experts", "gemma4-experts")
"""Variants with an expert that all rows go to."""


@pytest.mark.skipif("lfm2-moe" not in VARIANTS, reason="this transformers lacks the family")
@pytest.mark.parametrize(
    ("changes", "form"),
    [
        ({}, Routing.SIGMOIDS),
        ({"use_expert_bias": False}, Routing.SIGMOIDS),
        ({"norm_topk_prob": False}, None),
        ({"routed_scaling_factor": 1.5}, None),
    ],
)
@torch.inference_mode()
def test_a_router_is_computed_by_our_own_code_only_in_a_known_form(
    changes: dict[str, object], form: Routing | None
) -> None:
    model = tiny_model("lfm2-moe", **{"norm_topk_prob": True, "routed_scaling_factor": 1.0, **changes})
    block = next(layer.feed_forward for layer in model.model.layers if hasattr(layer.feed_forward, "experts"))
    found = router_of(block.gate, getattr(block, "expert_bias", None))
    assert (None if found is None else found.routing) == form


@pytest.mark.parametrize("variant", [each for each in (*ROUTED, *SHARED) if each in VARIANTS])
@torch.inference_mode()
def test_one_call_computes_what_experts_do_one_by_one(variant: str, tmp_path: Path) -> None:
    sizes = {"qwen3-moe": {"moe_intermediate_size": 64}, "granite-shared-expert": {"shared_intermediate_size": 64}}
    model = quantised_pair(tmp_path, variant, Type.Q8_0, **sizes.get(variant, {}))[0]
    for name, numbers in (*model.named_parameters(), *model.named_buffers()):
        if name.endswith(("router.scale", "router.per_expert_scale")):
            numbers.copy_(torch.rand_like(numbers) + 0.5)
    block = experts_of(Decoder(model), 2)
    assert block._whole is not None
    assert block.native is not None
    x = torch.randn(MOST_BY_ROW + 9, 64)
    whole = block.native(x, None)
    block._whole = None
    torch.testing.assert_close(whole, block(x, x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("variant", "path"),
    [
        ("qwen3.5-moe", "mlp.shared_expert_gate"),
        ("gemma4-experts", "router.proj"),
        ("gemma4-experts", "post_feedforward_layernorm_1"),
    ],
)
@torch.no_grad()
def test_a_later_hook_beside_experts_is_followed(variant: str, path: str, tmp_path: Path) -> None:
    model = packed(variant, Type.Q8_0, tmp_path)
    decoder, ids = Decoder(model), list(range(2, 20))
    assert decoder.layers[1].mlp.native is not None
    before = logits_of(decoder, ids)
    model.model.layers[1].get_submodule(path).register_forward_hook(lambda _m, _i, out: 2 - 3 * out)
    after = logits_of(decoder, ids)
    assert decoder.layers[1].mlp.native is None
    assert not torch.allclose(after, before, atol=1e-3)
    expected = model(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(after, expected, atol=0.05 * float(expected.abs().max()), rtol=0)


@torch.no_grad()
def test_a_hook_on_a_router_takes_its_part_out_of_the_call(tmp_path: Path) -> None:
    model = quantised_pair(tmp_path, "qwen3-moe", Type.Q4_0, **PACKED)[0]
    decoder, x = Decoder(model), torch.randn(3, 64)
    block = experts_of(decoder)
    before = block(x, x)
    model.model.layers[1].mlp.gate.register_forward_hook(lambda _m, _i, out: (out[0], out[1] * 0.5, out[2]))
    decoder.refresh()
    assert block.native is None
    assert not decoder.sublayers.are_whole
    torch.testing.assert_close(block(x, x), before / 2)


@pytest.mark.parametrize(
    ("variant", "path"),
    [
        ("qwen3-moe", "mlp.gate"),
        ("qwen3.5-moe", "mlp.shared_expert_gate"),
        ("qwen3.5-moe", "mlp.shared_expert.act_fn"),
        ("gemma4-experts", "router.norm"),
        ("gemma4-experts", "mlp.act_fn"),
    ],
)
@torch.no_grad()
def test_a_hook_between_two_steps_is_followed(variant: str, path: str, tmp_path: Path) -> None:
    decoder = Decoder(packed(variant, Type.Q8_0, tmp_path))
    cache = decoder.new_cache()
    cache.reserve(64)

    def states() -> torch.Tensor:
        return decoder.run(decoder.embed([3, 1, 4]), Batch.of([decoder.batches.consecutive(cache, 0, 3)]))

    before, calls = states(), list[int]()
    module = decoder.model.model.layers[1].get_submodule(path)
    handle = module.register_forward_hook(lambda _m, _i, out: calls.append(1))
    torch.testing.assert_close(states(), before, rtol=1e-3, atol=1e-3)
    assert calls
    handle.remove()
    assert torch.equal(states(), before)


class _Router(torch.nn.Module):
    """A router of the user's own, with parameters by names that another family's has."""

    def __init__(self, weight: torch.Tensor, each: int, extra: str) -> None:
        super().__init__()
        self.weight, self.each = torch.nn.Parameter(weight), each
        self.register_parameter(extra, torch.nn.Parameter(torch.ones(len(weight))))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        scores = (x.view(-1, x.shape[-1]) @ self.weight.T).softmax(-1)
        weights, chosen = scores.topk(self.each)
        return scores, weights / weights.sum(-1, keepdim=True), chosen


@pytest.mark.parametrize("extra", ["scale", "per_expert_scale"])
@pytest.mark.parametrize(
    ("variant", "parent", "name"), [("qwen3.5-moe", "mlp", "gate"), ("gemma4-experts", "", "router")]
)
@torch.no_grad()
def test_a_router_of_the_users_own_has_the_rows_that_it_had(
    variant: str, parent: str, name: str, extra: str, tmp_path: Path
) -> None:
    model = packed(variant, Type.F16, tmp_path)
    owner, number = model.model.layers[1].get_submodule(parent), model.config.num_experts
    setattr(owner, name, _Router(torch.randn(number, model.config.hidden_size), 2, extra))
    ids = list(range(2, 20))
    expected = model(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(logits_of(Decoder(model), ids), expected, atol=1e-3, rtol=1e-3)


def _other_activation(layer: torch.nn.Module) -> None:
    layer.mlp.shared_expert.act_fn = ACT2FN["gelu_pytorch_tanh"]


def _gate_bias(layer: torch.nn.Module) -> None:
    layer.mlp.shared_expert_gate.bias = torch.nn.Parameter(torch.ones(1))


def _factors_by_column(layer: torch.nn.Module) -> None:
    layer.layer_scalar = torch.rand(64) + 0.5


@pytest.mark.parametrize(
    ("variant", "change"),
    [
        ("qwen3.5-moe", _other_activation),
        ("qwen3.5-moe", _gate_bias),
        ("gemma4-experts", _factors_by_column),
    ],
)
@torch.no_grad()
def test_what_our_own_code_does_not_compute_is_left_to_the_model(
    variant: str, change: Callable[[torch.nn.Module], None], tmp_path: Path
) -> None:
    model, ids = packed(variant, Type.F16, tmp_path), list(range(2, 20))
    change(model.model.layers[1])
    expected = model(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(logits_of(Decoder(model), ids), expected, atol=1e-3, rtol=1e-3)


@torch.inference_mode()
def test_experts_multiply_by_the_models_own_memory() -> None:
    model = tiny_model("qwen3-moe")
    whole = model.model.layers[1].mlp.experts.gate_up_proj.untyped_storage().data_ptr()
    views = [linear._found()[0].weight for linear in experts_of(Decoder(model)).linears()[::2]]
    assert {view.untyped_storage().data_ptr() for view in views} == {whole}


@torch.no_grad()
def test_a_later_hook_on_a_packed_expert_is_followed(tmp_path: Path) -> None:
    decoder = Decoder(quantised_pair(tmp_path, "qwen3-moe", Type.Q8_0, **PACKED)[0])
    ids = list(range(2, 20))
    before = logits_of(decoder, ids)
    for expert in decoder.model.model.layers[1].mlp.experts.each:
        expert.down_proj.register_forward_hook(lambda _m, _i, out: 0 * out)
    after = logits_of(decoder, ids)
    assert not torch.allclose(after, before, atol=1e-3)
    expected = decoder.model(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(after, expected, atol=0.03 * float(expected.abs().max()), rtol=0)


@pytest.mark.skipif("lfm2-moe" not in VARIANTS, reason="this transformers lacks the family")
@torch.no_grad()
def test_a_bias_chooses_experts_and_does_not_weigh_them() -> None:
    model = tiny_model("lfm2-moe")
    decoder, ids = Decoder(model), list(range(2, 20))
    before = logits_of(decoder, ids)
    model.model.layers[1].feed_forward.expert_bias.add_(0.5)
    torch.testing.assert_close(assert_as_transformers(decoder, ids), before)
    assert decoder.version == 1


@torch.inference_mode()
def test_mlp_blocks_are_timed_on_the_rows_that_reach_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which experts rows share depends on the layers before. The next time, other rows reach them."""
    decoder = Decoder(tiny_model("olmoe", max_position_embeddings=512))
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda self, *size: self.new_full(*size, torch.nan))
    bench = _Bench(decoder, QUERIES, Timer(decoder.device))
    contexts = bench.contexts(0.0)
    monkeypatch.undo()
    assert all(memory.isfinite().all() for memory in bench.cache.pool.storage), "attention reads what was written"
    seen = list[torch.Tensor]()
    call = Experts.__call__
    monkeypatch.setattr(Experts, "__call__", lambda self, x, states: (seen.append(x), call(self, x, states))[1])
    work = bench._mlp(contexts[1], 4)
    whole = seen.copy()
    seen.clear()
    work()
    work()
    assert len(seen) == 8
    assert all(torch.equal(got, expected) for got, expected in zip(seen, whole, strict=False))
    assert not torch.allclose(seen[0], seen[4])
    assert torch.cat(seen).isfinite().all()
