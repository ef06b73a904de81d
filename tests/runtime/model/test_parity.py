"""An engine refuses what it would decode differently from the model, and follows models that were taken apart."""

from __future__ import annotations

from collections.abc import Callable
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
from ssd_runtime.engine.loop import generate
from ssd_runtime.engine.output.output import Limits
from ssd_runtime.loading.checks.parity import require_faithful
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.planning.makers import make_strategy
from ssd_runtime.planning.plan import ConstantPlanner, PlainPlanner, Plan
from ssd_runtime.planning.registry import read_settings
from ssd_runtime.sequence.session import Session
from tests.models import SharedScale, tiny_model
from tests.tables import latency_table

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
        with pytest.raises(UserError, match="the model has a hook or a forward of its own"):
            Decoder(model)
        with pytest.raises(UserError, match="the model has a hook or a forward of its own"):
            decoder.refresh()
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


def test_rows_that_share_a_scale_are_refused() -> None:
    model = tiny_model("llama", seed=2)
    for layer in model.model.layers:
        layer.mlp.down_proj = SharedScale(layer.mlp.down_proj)
    with pytest.raises(UserError, match="SharedScale modules compute a row differently where other rows stand"):
        require_faithful(Decoder(model))


@pytest.mark.filterwarnings("ignore")
def test_dynamic_int8_of_torch_is_refused() -> None:
    """It has one scale of activations for all rows."""
    model = tiny_model("llama", seed=2)
    quantised = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)
    with pytest.raises(UserError, match="Linear modules compute a row differently"):
        require_faithful(Decoder(quantised))


def test_modules_that_keep_rows_apart_are_served() -> None:
    class PerRow(SharedScale):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scale = x.abs().amax(-1, keepdim=True) / 127
            return self.inner((x / scale).round() * scale)

    model = tiny_model("llama", seed=2)
    for layer in model.model.layers:
        layer.mlp.down_proj = PerRow(layer.mlp.down_proj)
    require_faithful(Decoder(model))


IDS = [3, 1, 4, 1, 5]
LIMITS = Limits(40)
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
    whole = Decoder(tiny_model(family, seed=2))
    expected = generate(Session(whole), IDS, PlainPlanner(), LIMITS).token_ids
    model = tiny_model(family, seed=2)
    TAKEN_APART[way](model, tmp_path)
    assert any(parameter.is_meta for parameter in model.parameters()), "weights are away"
    decoder = Decoder(model)
    assert decoder.device.type == "cpu"
    mask = SubLayerPlan.of(decoder.shape.num_layers, {2, 5})
    for planner in (PlainPlanner(), ConstantPlanner(Plan.masked("test", mask, 4))):
        assert generate(Session(decoder), IDS, planner, LIMITS).token_ids == expected


@pytest.mark.parametrize("name", ["auto", "clasp", "knapsack", "swift", "exit"])
def test_layers_on_other_devices_get_their_inputs_there(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One memory under three names: the code that moves runs; that nothing is left behind only a GPU can tell."""
    expected = generate(Session(Decoder(tiny_model("gemma2", seed=2))), IDS, PlainPlanner(), LIMITS).token_ids
    devices = iter([torch.device("cpu"), *[torch.device("cpu", layer % 2) for layer in range(9)]])
    monkeypatch.setattr("ssd_runtime.model.layer.layer.device_of", lambda _: next(devices))
    decoder = Decoder(tiny_model("gemma2", seed=2))
    assert decoder.is_spread
    table = latency_table(decoder.shape.num_layers, per_token=1e-6)
    make = make_strategy(name, read_settings(name, []), decoder, None, table)
    assert generate(Session(decoder), IDS, make(), LIMITS).token_ids == expected


@pytest.mark.skipif(torch.cuda.device_count() < 1, reason="no CUDA device")
def test_a_model_half_on_a_gpu() -> None:
    whole = Decoder(tiny_model("llama", seed=2))
    expected = generate(Session(whole), IDS, PlainPlanner(), LIMITS).token_ids
    model = tiny_model("llama", seed=2)
    last = len(model.model.layers) - 1
    places = {f"model.layers.{layer}": "cpu" if layer < last else 0 for layer in range(last + 1)}
    ends = {"model.embed_tokens": "cpu", "model.rotary_emb": 0, "model.norm": 0, "lm_head": 0}
    # With the CPU as main device, what is put there runs there.
    dispatch_model(model, {**places, **ends}, main_device="cpu")
    decoder = Decoder(model)
    assert decoder.is_spread
    table = latency_table(decoder.shape.num_layers, per_token=1e-6)
    for name in ("plain", "auto", "clasp", "knapsack", "swift", "exit"):
        make = make_strategy(name, read_settings(name, []), decoder, None, table)
        assert generate(Session(decoder), IDS, make(), LIMITS).token_ids == expected
