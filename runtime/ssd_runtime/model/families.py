"""Which model families are understood, where their modules are, and what differs between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from transformers import PreTrainedConfig

from ssd_profiles.errors import UserError

ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})
"""Rotary embeddings whose angles depend on the position alone, so that a table can hold them."""
LONGROPE = "longrope"
"""The one whose angles depend on the sequence's length too: one set up to the original context, another beyond."""


@dataclass(frozen=True, slots=True)
class Family:
    """How a family's decoder layer is built. Every family calls its blocks `self_attn` and `mlp`."""

    title: str
    qk_norm: Literal["head", "projection"] | None = None
    """Whether queries and keys are normed before the rotation: each head by itself, or all heads as one vector."""
    norm_offset: float = 0.0
    """What is added to a norm's stored weight before it is applied."""
    attention_norm: str | None = "input_layernorm"
    mlp_norm: str | None = "post_attention_layernorm"
    attention_after: str | None = None
    """The norm of the attention block's output, before it joins the residual stream."""
    mlp_after: str | None = None
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    activation: str = "act_fn"
    windows: Literal["never", "by_layer", "everywhere"] = "never"
    """Where attention slides: nowhere, where `config.layer_types` says so, or everywhere if a window is set."""
    rope_by_layer: bool = False
    """Whether `config.rope_parameters` holds one rotary embedding a layer type."""
    no_rope: str | None = None
    """The setting that lists, a layer, whether there is a rotation at all."""
    longrope: bool = False
    """Whether the cache is computed again with the other angles once a sequence outgrows the original context."""
    scaled_embedding: bool = False
    """Whether embeddings are multiplied by the root of the hidden size."""
    attention_cap: str | None = None
    logit_cap: str | None = None
    embedding_multiplier: str | None = None
    residual_multiplier: str | None = None
    logit_divisor: str | None = None


_GEMMA: dict[str, Any] = {
    "norm_offset": 1.0,
    "scaled_embedding": True,
    "attention_after": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_after": "post_feedforward_layernorm",
    "windows": "by_layer",
    "logit_cap": "final_logit_softcapping",
}

FAMILIES = {
    "llama": Family("Llama"),
    "mistral": Family("Mistral", windows="everywhere"),
    "qwen2": Family("Qwen2", windows="by_layer"),
    "qwen3": Family("Qwen3", windows="by_layer", qk_norm="head"),
    "phi3": Family(
        "Phi-3",
        qkv=("qkv_proj",),
        gate_up=("gate_up_proj",),
        activation="activation_fn",
        windows="everywhere",
        longrope=True,
    ),
    "gemma2": Family("Gemma-2", **_GEMMA, attention_cap="attn_logit_softcapping"),
    "gemma3_text": Family("Gemma-3 (text)", **_GEMMA, qk_norm="head", rope_by_layer=True),
    "olmo2": Family(
        "OLMo-2",
        qk_norm="projection",
        attention_norm=None,
        attention_after="post_attention_layernorm",
        mlp_norm=None,
        mlp_after="post_feedforward_layernorm",
    ),
    "granite": Family(
        "Granite",
        embedding_multiplier="embedding_multiplier",
        residual_multiplier="residual_multiplier",
        logit_divisor="logits_scaling",
    ),
    "smollm3": Family("SmolLM3", windows="by_layer", no_rope="no_rope_layers"),
}
"""By `config.model_type`. Adding one: an entry here and one in `tests/models.py` (see CONTRIBUTING.md)."""


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What attention in a layer may see and how it is rotated: layers that share it share masks and latencies."""

    name: Literal["full", "sliding"]
    window: int | None = None
    """A row sees itself and `window` - 1 rows before it."""
    rope: str | None = "default"
    """Which of the model's rotary embeddings; None for no rotation."""


def family_of(config: PreTrainedConfig) -> Family:
    """The family of a causal LM. Raises UserError, naming what is supported, for anything else."""
    kind = str(config.model_type)
    family = FAMILIES.get(kind)
    if family is None:
        raise _refusal(f"a {kind} model is not supported")
    if getattr(config, "use_bidirectional_attention", None):
        raise _refusal("attention in both directions is not supported")
    for rope in rope_types(config, family).values():
        if rope not in ROPE_TYPES and not (rope == LONGROPE and family.longrope):
            raise _refusal(f"rotary embedding {rope!r} is not supported (only {', '.join(sorted(ROPE_TYPES))})")
    unknown = {kind for kind in _layer_types(config, family) if kind not in ("full_attention", "sliding_attention")}
    if unknown:
        raise _refusal(f"layers of type {', '.join(sorted(unknown))} are not supported")
    return family


def rope_types(config: PreTrainedConfig, family: Family) -> dict[str, str]:
    """The rope type of each of the model's rotary embeddings, by name; a single one is called `default`."""
    ropes = _rope_parameters(config, family)
    return {name: parameters.get("rope_type", "default") for name, parameters in ropes.items()}


def max_context(config: PreTrainedConfig) -> int:
    """The longest sequence, in tokens.

    YaRN extends the original context by its factor. Many configurations, by Qwen2.5's recipe, have that factor and
    leave `max_position_embeddings` at the original.
    """
    longest = int(config.max_position_embeddings)
    for parameters in _rope_parameters(config, family_of(config)).values():
        if parameters.get("rope_type") == "yarn":
            original = parameters.get("original_max_position_embeddings") or config.max_position_embeddings
            longest = max(longest, int((parameters.get("factor") or 1.0) * original))
    return longest


def layer_kinds(config: PreTrainedConfig, family: Family) -> list[LayerKind]:
    """The kind of every layer."""
    rotated = getattr(config, family.no_rope) if family.no_rope else None
    kinds = []
    for layer, layer_type in enumerate(_layer_types(config, family)):
        rope: str | None = layer_type if family.rope_by_layer else "default"
        if rotated is not None and not rotated[layer]:
            rope = None
        slides = layer_type == "sliding_attention"
        kinds.append(LayerKind("sliding", config.sliding_window, rope) if slides else LayerKind("full", None, rope))
    return kinds


def setting(config: PreTrainedConfig, name: str | None) -> float | None:
    """A number of the config, where the family has it and the model uses it."""
    value = getattr(config, name, None) if name else None
    return None if value is None else float(value)


def _rope_parameters(config: PreTrainedConfig, family: Family) -> dict[str, dict[str, Any]]:
    """The parameters of each of the model's rotary embeddings, by name."""
    parameters: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    if not family.rope_by_layer:
        return {"default": parameters}
    return {name: parameters.get(name) or {} for name in sorted(set(_layer_types(config, family)))}


def _layer_types(config: PreTrainedConfig, family: Family) -> list[str]:
    listed = getattr(config, "layer_types", None) if family.windows == "by_layer" else None
    if listed:
        return list(listed)
    slides = family.windows == "everywhere" and getattr(config, "sliding_window", None)
    return ["sliding_attention" if slides else "full_attention"] * int(config.num_hidden_layers)


def _refusal(what: str) -> UserError:
    titles = ", ".join(family.title for family in FAMILIES.values())
    return UserError(f"model: {what}; supported are causal LMs of these families: {titles}")
