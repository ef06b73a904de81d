"""The supported model families: their modules, and the differences between them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from transformers import PreTrainedConfig

from ssd_profiles.errors import UserError
from ssd_runtime.model.family.factors import falcon_h1_factors
from ssd_runtime.model.family.family import Family
from ssd_runtime.model.family.layer_kinds import (
    LONGROPE,
    ROPE_TYPES,
    layer_types,
    rope_parameters,
    rope_types,
    unread_rope_parameters,
)
from ssd_runtime.model.mixers.delta_net import GatedDeltaNet, GroupedDeltaNet
from ssd_runtime.model.mixers.mamba import Mamba2
from ssd_runtime.model.mixers.short_convolution import ShortConvolution

_GRANITE: dict[str, Any] = {
    "embedding_multiplier": "embedding_multiplier",
    "residual_multiplier": "residual_multiplier",
    "logit_divisor": "logits_scaling",
}
_LFM2: dict[str, Any] = {
    "qk_norm": "head",
    "qk_norms": ("q_layernorm", "k_layernorm"),
    "attention_norm": "operator_norm",
    "mlp_norm": "ffn_norm",
    "final_norm": "embedding_norm",
    "output": "out_proj",
    "mlp": "feed_forward",
    "gate_up": ("w1", "w3"),
    "activation": None,
    "down": "w2",
    "windows": "by_layer",
    "mixers": (("conv", ShortConvolution),),
}
_GRANITE_SHARED: dict[str, Any] = {
    "mlp": "block_sparse_moe",
    "router": "router",
    "shared": "shared_mlp",
    "gate_up": ("input_linear",),
    "activation": "activation",
    "down": "output_linear",
}
_NORMS_AFTER: dict[str, Any] = {
    "attention_norm": None,
    "attention_after": "post_attention_layernorm",
    "mlp_norm": None,
    "mlp_after": "post_feedforward_layernorm",
}
_GLM: dict[str, Any] = {"gate_up": ("gate_up_proj",), "activation": "activation_fn", "pairs_alternate": True}
_GEMMA: dict[str, Any] = {
    "norm_offset": 1.0,
    "scaled_embedding": True,
    "attention_after": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_after": "post_feedforward_layernorm",
    "windows": "by_layer",
    "logit_cap": "final_logit_softcapping",
}

_QWEN35: dict[str, Any] = {
    "norm_offset": 1.0,
    "qk_norm": "head",
    "gated": True,
    "windows": "by_layer",
    "mixers": (("linear_attention", GatedDeltaNet),),
    "predicts_ahead": True,
}
_QWEN35_EXPERTS: dict[str, Any] = {
    "router": "gate",
    "shared": "mlp.shared_expert",
    "shared_gate": "shared_expert_gate",
}

FAMILIES = {
    "llama": Family("Llama"),
    "mistral": Family("Mistral", windows="everywhere"),
    "ministral": Family("Ministral", windows="by_layer"),
    "ministral3": Family("Ministral-3", windows="everywhere", query_scaling=True),
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
    "gemma4_text": Family(
        "Gemma-4 (text)",
        **{**_GEMMA, "norm_offset": 0.0},
        qk_norm="head",
        v_norm="v_norm",
        shared_keys="num_kv_shared_layers",
        layer_inputs="hidden_size_per_layer_input",
        layer_scalar="layer_scalar",
        rope_by_layer=True,
        router="router",
        beside=("pre_feedforward_layernorm_2", "post_feedforward_layernorm_2", "post_feedforward_layernorm_1"),
    ),
    "olmo2": Family("OLMo-2", **_NORMS_AFTER, qk_norm="projection"),
    "olmo3": Family("OLMo-3", **_NORMS_AFTER, qk_norm="projection", windows="by_layer", rope_by_layer=True),
    "exaone4": Family("EXAONE-4", **_NORMS_AFTER, qk_norm="head", windows="by_layer", rope_in_windows=True),
    "hunyuan_v1_dense": Family(
        "HunYuan (dense)", qk_norm="rotated", qk_norms=("query_layernorm", "key_layernorm"), fixed_alpha=True
    ),
    "glm": Family("GLM", **_GLM),
    "glm4": Family("GLM-4", **_GLM, attention_after="post_self_attn_layernorm", mlp_after="post_mlp_layernorm"),
    "granite": Family("Granite", **_GRANITE),
    "seed_oss": Family("Seed-OSS"),
    "ernie4_5": Family("ERNIE-4.5", pairs_alternate=True),
    "helium": Family("Helium", pairs_alternate=True),
    "arcee": Family("Arcee", gate_up=("up_proj",), gated_mlp=False),
    "apertus": Family(
        "Apertus",
        attention_norm="attention_layernorm",
        mlp_norm="feedforward_layernorm",
        qk_norm="head",
        gate_up=("up_proj",),
        gated_mlp=False,
    ),
    "smollm3": Family("SmolLM3", windows="by_layer", no_rope="no_rope_layers"),
    "qwen3_moe": Family("Qwen3-MoE", windows="everywhere", qk_norm="head", router="gate"),
    "olmoe": Family("OLMoE", qk_norm="projection", router="gate", unserved=("clip_qkv",)),
    "granitemoe": Family("Granite-MoE", **_GRANITE, mlp="block_sparse_moe", router="router"),
    "gpt_oss": Family("GPT-OSS", windows="by_layer", sinks=True, angles_once=True, router="router"),
    "mixtral": Family("Mixtral", windows="everywhere", router="gate"),
    "lfm2": Family("LFM2", **_LFM2),
    "lfm2_moe": Family("LFM2-MoE", **_LFM2, rotary="pos_emb", router="gate", router_bias="expert_bias"),
    "qwen3_5_text": Family("Qwen3.5", **_QWEN35),
    "qwen3_5_moe_text": Family("Qwen3.5-MoE", **_QWEN35, **_QWEN35_EXPERTS),
    "qwen3_next": Family(
        "Qwen3-Next", **{**_QWEN35, "mixers": (("linear_attention", GroupedDeltaNet),)}, **_QWEN35_EXPERTS
    ),
    "falcon_h1": Family(
        "Falcon-H1",
        mlp="feed_forward",
        mlp_norm="pre_ff_layernorm",
        final_norm="final_layernorm",
        parallel=Mamba2,
        factors=falcon_h1_factors,
        embedding_multiplier="embedding_multiplier",
        logit_multiplier="lm_head_multiplier",
        unserved=("attention_bias", "mamba_proj_bias"),
    ),
    "granitemoeshared": Family("Granite-MoE with a shared expert", **_GRANITE, **_GRANITE_SHARED),
    "granitemoehybrid": Family(
        "Granite-4 hybrid",
        **_GRANITE,
        **_GRANITE_SHARED,
        windows="by_layer",
        mixers=(("linear_attention", Mamba2), ("mamba", Mamba2)),
        rope_setting="position_embedding_type",
    ),
}
"""Families by `config.model_type`. A new one needs an entry here and one in `tests/models.py` (CONTRIBUTING.md)."""


def family_of(config: PreTrainedConfig) -> Family:
    """The family of a causal LM. Raises UserError for unsupported models, with a list of the supported ones."""
    kind = str(config.model_type)
    family = FAMILIES.get(kind)
    if family is None:
        raise _refusal(f"a {kind} model is not supported")
    if getattr(config, "use_bidirectional_attention", None) not in (None, False, "vision"):  # that is of images alone
        raise _refusal("attention in both directions is not supported")
    if family.shared is not None and getattr(config, "num_local_experts", None) == 0:
        family = replace(family, mlp=family.shared, router=None, shared=None)
    elif family.shared is not None and getattr(config, "shared_intermediate_size", None) == 0:
        family = replace(family, shared=None)
    if family.beside is not None and not getattr(config, "enable_moe_block", False):
        family = replace(family, router=None, beside=None)
    for name in family.unserved:
        if getattr(config, name, None):
            raise _refusal(f"the setting {name} of a {family.title} model is not supported")
    for rope in rope_types(config, family).values():
        if rope not in ROPE_TYPES and not (rope == LONGROPE and family.longrope):
            raise _refusal(f"rotary embedding {rope!r} is not supported (only {', '.join(sorted(ROPE_TYPES))})")
    if unread := ", ".join(unread_rope_parameters(config, family)):
        raise _refusal(f"rope_parameters with {unread[:60]} outside of those of layer types are not supported")
    types = set(layer_types(config, family))
    mixed = {kind for kind, _ in family.mixers}
    unknown = types - {"full_attention", "sliding_attention", *mixed}
    if unknown:
        raise _refusal(f"layers of type {', '.join(sorted(unknown))} are not supported")
    if types <= mixed:
        raise _refusal("a model without attention is not supported")
    return family


def max_context(config: PreTrainedConfig) -> int:
    """The longest sequence, in tokens.

    YaRN extends the original context by its factor. Many configurations follow Qwen2.5's recipe, which has that factor
    and leaves `max_position_embeddings` at the original.
    """
    longest = int(config.max_position_embeddings)
    for parameters in rope_parameters(config, family_of(config)).values():
        if parameters.get("rope_type") == "yarn":
            original = parameters.get("original_max_position_embeddings") or config.max_position_embeddings
            longest = max(longest, int((parameters.get("factor") or 1.0) * original))
    return longest


def _refusal(what: str) -> UserError:
    titles = ", ".join(family.title for family in FAMILIES.values())
    return UserError(f"model: {what}; supported are causal LMs of these families: {titles}")
