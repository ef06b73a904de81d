"""An engine refuses what its view of a model would decode differently from the model."""

from __future__ import annotations

from types import MethodType

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedModel
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRotaryEmbedding

from ssd_profiles.errors import UserError
from ssd_runtime.loading.checks.parity import require_faithful
from ssd_runtime.model.decoder import Decoder
from tests.models import VARIANTS, SharedScale, tiny_model

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_family_is_faithful(variant: str, dtype: torch.dtype) -> None:
    require_faithful(Decoder(tiny_model(variant, seed=4).to(dtype)))


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
