"""Which model families are understood, where their modules are, and what differs between them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from ssd_profiles.errors import UserError

ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})
"""Rotary embeddings whose angles depend on the position alone, so that a table can hold them."""


@dataclass(frozen=True, slots=True)
class Family:
    """How a family's decoder layer is built. Module names are relative to the layer."""

    title: str
    qk_norm: bool = False
    """Whether queries and keys are normed a head, before the rotation."""
    attention: str = "self_attn"
    mlp: str = "mlp"
    attention_norm: str = "input_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    output: str = "o_proj"
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"


FAMILIES = {
    "llama": Family("Llama"),
    "qwen2": Family("Qwen2"),
    "qwen3": Family("Qwen3", qk_norm=True),
}
"""By `config.model_type`. Adding one: an entry here and a line in tests/runtime/test_families.py."""


def family_of(model: PreTrainedModel) -> Family:
    """The family of a loaded causal LM. Raises UserError, naming what is supported, for anything else."""
    config = model.config
    kind = getattr(config, "model_type", type(model).__name__)
    family = FAMILIES.get(kind)
    if family is None or not isinstance(getattr(model, "lm_head", None), nn.Module):
        raise _refusal(f"a {kind} model ({type(model).__name__}) is not supported")
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope not in ROPE_TYPES:
        raise _refusal(f"rotary embedding {rope!r} is not supported (only {', '.join(sorted(ROPE_TYPES))})")
    layers = set(getattr(config, "layer_types", None) or ["full_attention"])
    if layers != {"full_attention"}:
        raise _refusal(f"layers of type {', '.join(sorted(layers - {'full_attention'}))} are not supported")
    return family


def _refusal(what: str) -> UserError:
    titles = ", ".join(family.title for family in FAMILIES.values())
    return UserError(f"model: {what}; supported: {titles} causal LMs with full attention")
