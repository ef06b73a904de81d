"""An engine refuses what it would decode differently from the model, and follows models that were taken apart."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import MethodType

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.hooks import RemovableHandle
from transformers import LlamaForCausalLM, PreTrainedModel
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRotaryEmbedding

from ssd_profiles.errors import UserError
from ssd_profiles.mask import SubLayerPlan
from ssd_runtime.loading.checks.parity import require_faithful
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.planning.plan import Plan
from tests.decoding import plainly, speculate, strategy_of
from tests.models import SharedScale, tiny_model

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Doubling(LlamaForCausalLM):
    def forward(self, *args: object, **kwargs: object) -> object:
        out = super().forward(*args, **kwargs)
        out.logits = out.logits * 2
        return out


def test_a_subclass_with_its_own_forward_is_refused() -> None:
    model = tiny_model("llama")
    model.__class__ = Doubling
    with pytest.raises(UserError, match="the model has a hook or a forward of its own"):
        Decoder(model)


def test_a_patched_class_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As libraries that extend the context do it, for all models of a process."""
    model = tiny_model("llama")
    own = modeling_llama.LlamaAttention.forward
    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", lambda self, *a, **k: own(self, *a, **k))
    with pytest.raises(UserError, match=r"layers\.0\.self_attn has a hook or a forward of its own"):
        Decoder(model)


@pytest.mark.parametrize("register", [register_module_forward_hook, register_module_forward_pre_hook])
def test_a_hook_of_all_modules_is_refused_but_a_profilers(register: Callable[..., RemovableHandle]) -> None:
    model = tiny_model("llama")
    with FlopCounterMode(model, display=False):
        decoder = Decoder(model)
    hook = register(lambda module, *values: None)
    try:
        for checked in (lambda: Decoder(model), decoder.refresh):
            with pytest.raises(UserError, match="the model has a hook or a forward of its own"):
                checked()
    finally:
        hook.remove()
    decoder.refresh()


def _scaled_embedding(model: PreTrainedModel) -> None:
    """An addition that a later transformers might make to a family, here to its base model's own code."""
    own = type(model.model).forward

    def forward(self: object, input_ids: torch.Tensor, **kwargs: object) -> object:
        return own(self, **{**kwargs, "inputs_embeds": 3 * model.model.embed_tokens(input_ids) + 1})

    forward.__module__ = own.__module__
    model.model.forward = MethodType(forward, model.model)


def _other_activation(model: PreTrainedModel) -> None:
    for layer in model.model.layers:

        def forward(x: torch.Tensor, mlp: LlamaMLP = layer.mlp) -> torch.Tensor:
            return mlp.down_proj(torch.tanh(mlp.gate_proj(x)) * mlp.up_proj(x))

        forward.__module__ = type(layer.mlp).__module__
        layer.mlp.forward = forward


def _other_rotation(model: PreTrainedModel) -> None:
    class Slower(LlamaRotaryEmbedding):
        def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            # Depends on how many positions come at once, which the engine's tables do not know.
            return super().forward(x, position_ids * (1 if position_ids.shape[-1] > 32 else 0.5))

    model.model.rotary_emb.__class__ = Slower


@pytest.mark.parametrize("change", [_scaled_embedding, _other_activation, _other_rotation])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_model_that_computes_something_else_is_refused(change: object, dtype: torch.dtype) -> None:
    model = tiny_model("llama", seed=2).to(dtype)
    change(model)  # type: ignore[operator]
    with pytest.raises(UserError, match="computes other logits than a Llama model"):
        require_faithful(Decoder(model))


class ScalePerRow(SharedScale):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().amax(-1, keepdim=True) / 127
        return self.inner((x / scale).round() * scale)


@pytest.mark.filterwarnings("ignore")
def test_rows_that_share_a_scale_are_refused_and_those_with_scales_of_their_own_served() -> None:
    """The dynamic int8 of torch has one scale of activations for all rows."""
    model = tiny_model("llama", seed=2)
    quantised = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)
    with pytest.raises(UserError, match="Linear modules compute a row differently"):
        require_faithful(Decoder(quantised))
    for scaled, asking in (
        (ScalePerRow, nullcontext()),
        (SharedScale, pytest.raises(UserError, match="SharedScale modules compute a row differently where other")),
    ):
        model = tiny_model("llama", seed=2)
        for layer in model.model.layers:
            layer.mlp.down_proj = scaled(layer.mlp.down_proj)
        with asking:
            require_faithful(Decoder(model))


IDS = [3, 1, 4, 1, 5]
TAKEN_APART: dict[str, Callable[[PreTrainedModel, Path], object]] = {
    "kept on the CPU until needed": lambda model, _: cpu_offload(model, torch.device("cpu")),
    "kept on disk until needed": lambda model, folder: disk_offload(model, folder, torch.device("cpu")),
    "some layers on disk": lambda model, folder: dispatch_model(
        model,
        {
            **dict.fromkeys(("model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head"), "cpu"),
            **{f"model.layers.{layer}": "cpu" if layer < 2 else "disk" for layer in range(len(model.model.layers))},
        },
        main_device="cpu",
        offload_dir=folder,
    ),
}


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("way", TAKEN_APART)
def test_an_offloaded_model_decodes_as_it_does_in_one_piece(way: str, family: str, tmp_path: Path) -> None:
    expected = plainly(Decoder(tiny_model(family, seed=2)), IDS, 40)
    model = tiny_model(family, seed=2)
    TAKEN_APART[way](model, tmp_path)
    assert any(parameter.is_meta for parameter in model.parameters()), "weights are away"
    decoder = Decoder(model)
    assert decoder.device.type == "cpu"
    mask = SubLayerPlan.of(decoder.shape.num_layers, {2, 5})
    for plan in (Plan("plain"), Plan.masked("test", mask, 4)):
        assert speculate(decoder, IDS, plan, 40).token_ids == expected


@pytest.mark.parametrize("name", ["auto", "clasp", "knapsack", "swift", "exit"])
def test_layers_on_other_devices_get_their_inputs_there(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One memory under three names: the code that moves runs; that nothing is left behind only a GPU can tell."""
    expected = plainly(Decoder(tiny_model("gemma2", seed=2)), IDS, 40)
    devices = iter([torch.device("cpu"), *[torch.device("cpu", layer % 2) for layer in range(9)]])
    monkeypatch.setattr("ssd_runtime.model.layer.layer.device_of", lambda _: next(devices))
    decoder = Decoder(tiny_model("gemma2", seed=2))
    assert decoder.is_spread
    assert speculate(decoder, IDS, strategy_of(name, decoder)(), 40).token_ids == expected


@pytest.mark.skipif(torch.cuda.device_count() < 1, reason="no CUDA device")
def test_a_model_half_on_a_gpu() -> None:
    expected = plainly(Decoder(tiny_model("llama", seed=2)), IDS, 40)
    model = tiny_model("llama", seed=2)
    last = len(model.model.layers) - 1
    places = {f"model.layers.{layer}": "cpu" if layer < last else 0 for layer in range(last + 1)}
    ends = {"model.embed_tokens": "cpu", "model.rotary_emb": 0, "model.norm": 0, "lm_head": 0}
    # With the CPU as main device, what is put there runs there.
    dispatch_model(model, {**places, **ends}, main_device="cpu")
    decoder = Decoder(model)
    assert decoder.is_spread
    for name in ("plain", "auto", "clasp", "knapsack", "swift", "exit"):
        assert speculate(decoder, IDS, strategy_of(name, decoder)(), 40).token_ids == expected
