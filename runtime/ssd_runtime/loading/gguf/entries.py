"""The entries of a configuration that only some architectures' `.gguf` files have, from their metadata."""

from __future__ import annotations

from typing import Any

from ssd_runtime.loading.gguf.metadata import Metadata

Entries = dict[str, Any]
"""Entries of a transformers configuration by name."""
SOFTMAX, SIGMOID, CHOSEN = 1, 2, 3
"""The numbers of llama.cpp for routers that weigh experts by a softmax, a sigmoid, or a softmax of the chosen alone."""
KV_HEADS = "attention.head_count_kv"
"""Number of key-value heads; in a list by layer, 0 for layers that mix tokens otherwise than by attention."""
PREDICTING = "nextn_predict_layers"
"""Number of layers after the model's own that predict further tokens."""
SSM_SIZES = ("conv_kernel", "state_size", "group_count", "inner_size", "time_step_rank")
QUERY_SCALING = "attention.temperature_scale"
"""Growth of queries with their position (`Family.query_scaling`)."""
GEMMA4_LISTS = {KV_HEADS: "num_key_value_heads", "feed_forward_length": "intermediate_size"}
"""Keys of Gemma-4's files whose values differ by layer, and the configuration's entries."""


def none(metadata: Metadata, common: Entries) -> Entries:
    """No entries: the architecture has none of its own."""
    return {}


def llama(metadata: Metadata, common: Entries) -> Entries:
    """Llama's own entries, or Mistral's and Mixtral's, which llama.cpp's converter writes as Llama."""
    metadata.expect("tensor_data_layout", "Meta AI original pth")
    window = metadata.optional(int, "attention.sliding_window")
    if metadata.optional(int, "expert_count"):
        return {**_experts(metadata, common), "model_type": "mixtral", "sliding_window": window or None}
    return {"model_type": "mistral", "sliding_window": window} if window else {}


def mistral3(metadata: Metadata, common: Entries) -> Entries:
    """Ministral-3's own entries, or Mistral's."""
    return {} if metadata.optional(float, QUERY_SCALING) else {"model_type": "mistral", "sliding_window": None}


def pictured(metadata: Metadata, common: Entries) -> Entries:
    """No entries: rotations by place in a picture, and features of pictures for the first layers, touch no text."""
    metadata.ignore(("rope.dimension_sections", "n_deepstack_layers"))
    return {}


def phi3(metadata: Metadata, common: Entries) -> Entries:
    """Phi-3's own entries."""
    window = metadata.optional(int, "attention.sliding_window")
    return {"sliding_window": window or None}


def gemma2(metadata: Metadata, common: Entries) -> Entries:
    """Gemma-2's own entries."""
    return {
        **_gemma(metadata, common, large=46, cap=30.0),
        **_windows(metadata, common, period=2, default=4096),
        "attn_logit_softcapping": _cap(metadata, "attn_logit_softcapping", 50.0),
    }


def gemma3(metadata: Metadata, common: Entries) -> Entries:
    """Gemma-3's own entries."""
    metadata.expect("attn_logit_softcapping")
    return {**_gemma(metadata, common, large=62, cap=0.0), **_windows(metadata, common, period=6, default=0)}


def gemma4(metadata: Metadata, common: Entries) -> Entries:
    """Gemma-4's own entries; many of its sizes differ by layer."""
    layers, heads = common["num_hidden_layers"], common["num_attention_heads"]
    entries = _windows(metadata, common, period=6, default=0)
    full = [layer for layer, kind in enumerate(entries["layer_types"]) if kind == "full_attention"]
    keys, inner = (metadata.listed(key) or [common[entry]] * layers for key, entry in GEMMA4_LISTS.items())
    shared = metadata.optional(int, "attention.shared_kv_layers") or 0
    double = [2 * common["intermediate_size"] if layer >= layers - shared else inner[0] for layer in range(layers)]
    width = metadata.optional(int, "attention.key_length_swa") or common["head_dim"]
    metadata.expect("attention.value_length_swa", width)
    if not all(type(each) is int and each > 0 and heads % each == 0 for each in keys) or len(keys) != layers:
        raise metadata.refusal(KV_HEADS, f"is {keys} for {heads} heads, which")
    if inner not in (double, [inner[0]] * layers):
        raise metadata.refusal("feed_forward_length", f"is {inner}, which")
    return {
        **entries,
        **_gemma4_experts(metadata),
        "head_dim": width,
        "per_layer_config": {
            str(layer): {"head_dim": common["head_dim"], "num_key_value_heads": keys[layer]} for layer in full
        },
        "num_key_value_heads": next((count for layer, count in enumerate(keys) if layer not in full), keys[0]),
        "num_kv_shared_layers": shared,
        "use_double_wide_mlp": inner != [inner[0]] * layers,
        "attention_k_eq_v": not any(
            metadata.has(f"blk.{layer}.attn_{each}.weight") for layer in full for each in ("v", "qkv")
        ),
        "hidden_size_per_layer_input": metadata.optional(int, "embedding_length_per_layer_input") or 0,
        "vocab_size_per_layer_input": common["vocab_size"],
        "final_logit_softcapping": _cap(metadata, "final_logit_softcapping", 0.0),
    }


def _gemma4_experts(metadata: Metadata) -> Entries:
    metadata.expect("expert_gating_func", SOFTMAX)
    if not metadata.optional(int, "expert_count"):
        return {}
    return {
        "enable_moe_block": True,
        "num_experts": metadata.count("expert_count"),
        "top_k_experts": _used_experts(metadata),
        "moe_intermediate_size": metadata.count("expert_feed_forward_length"),
    }


def _gemma(metadata: Metadata, common: Entries, large: int, cap: float) -> Entries:
    """Entries that Gemma-2 and Gemma-3 share; their largest model, of `large` layers, scales scores otherwise."""
    width = common["hidden_size"] // common["num_attention_heads"]
    return {
        "query_pre_attn_scalar": width if common["num_hidden_layers"] == large else common["head_dim"],
        "final_logit_softcapping": _cap(metadata, "final_logit_softcapping", cap),
    }


def _cap(metadata: Metadata, key: str, default: float) -> float | None:
    """A soft-cap; None for no cap, which files write as 0."""
    found = metadata.optional(float, key)
    return (default if found is None else found) or None


def _windows(metadata: Metadata, common: Entries, period: int, default: int) -> Entries:
    """Windows of all layers but the last of each `period`, unless the file lists them."""
    window = metadata.optional(int, "attention.sliding_window")
    window = default if window is None else window
    layers = common["num_hidden_layers"]
    key = "attention.sliding_window_pattern"
    listed = metadata.listed(key)
    if listed is None:
        every = metadata.optional(int, key) or period
        listed = [(number + 1) % every != 0 for number in range(layers)]
    if len(listed) != layers or not all(type(each) in (bool, int) for each in listed):
        raise metadata.refusal(key, f"lists no number for each of {layers} layers, which")
    kinds = ["sliding_attention" if window and slides else "full_attention" for slides in listed]
    return {"layer_types": kinds, "sliding_window": window or None}


def olmo2(metadata: Metadata, common: Entries) -> Entries:
    """OLMo-2's own entries, or OLMo-3's, whose layers have windows."""
    entries = _windows(metadata, common, period=4, default=0)
    return {"model_type": "olmo3", **entries} if entries["sliding_window"] else {}


def exaone4(metadata: Metadata, common: Entries) -> Entries:
    """EXAONE-4's own entries; only its largest model, of 64 layers, has windows."""
    return _windows(metadata, common, period=4, default=4096 if common["num_hidden_layers"] == 64 else 0)


def minicpm(metadata: Metadata, common: Entries) -> Entries:
    """Entries of MiniCPM, whose models are Granite's."""
    for key in ("embedding_scale", "residual_scale", "logit_scale"):
        if not metadata.required(float, key) > 0:
            raise metadata.refusal(key, "is not above 0, which")
    metadata.expect("attention.scale")
    return {"attention_multiplier": common["head_dim"] ** -0.5, **_granite_factors(metadata)}


def granite(metadata: Metadata, common: Entries) -> Entries:
    """Granite's own entries."""
    # Files of Granite-4's dense models without recurrences have these sizes too, and their MLP's under another name.
    metadata.ignore(f"ssm.{name}" for name in SSM_SIZES)
    shared = metadata.optional(int, "expert_shared_feed_forward_length")
    return {**_rotated_granite(metadata), **({"intermediate_size": shared} if shared else {})}


def _rotated_granite(metadata: Metadata) -> Entries:
    metadata.expect("rope.scaling.finetuned", True)  # without it the architecture has no rotation
    return _granite_factors(metadata)


def _granite_factors(metadata: Metadata) -> Entries:
    names = {
        "attention.scale": "attention_multiplier",
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "logit_scale": "logits_scaling",
    }
    found = {name: metadata.optional(float, key) for key, name in names.items()}
    return {name: value for name, value in found.items() if value}


def granitemoe(metadata: Metadata, common: Entries) -> Entries:
    """Granite-MoE's own entries, with an expert of all rows or without."""
    entries = {**_rotated_granite(metadata), **_experts(metadata, common)}
    shared = metadata.optional(int, "expert_shared_feed_forward_length")
    return {**entries, "model_type": "granitemoeshared", "shared_intermediate_size": shared} if shared else entries


def _experts(metadata: Metadata, common: Entries, count: str = "num_local_experts", gating: int = SOFTMAX) -> Entries:
    """Entries of a mixture, whose router weighs experts by `gating`; `count` is the entry with their number."""
    metadata.expect("expert_gating_func", gating)
    return {count: metadata.count("expert_count"), "num_experts_per_tok": _used_experts(metadata)}


def _used_experts(metadata: Metadata) -> int:
    """The number of experts that a row runs."""
    count, used = metadata.count("expert_count"), metadata.count("expert_used_count")
    if used > count:
        raise metadata.refusal("expert_used_count", f"is {used} of {count} experts, which")
    return used


def olmoe(metadata: Metadata, common: Entries) -> Entries:
    """OLMoE's own entries."""
    metadata.expect("expert_weights_norm", False)
    return {**_experts(metadata, common, "num_experts"), "norm_topk_prob": False}


def qwen3moe(metadata: Metadata, common: Entries) -> Entries:
    """Qwen3-MoE's own entries."""
    metadata.expect("expert_weights_norm", True)
    own = {"norm_topk_prob": True, "moe_intermediate_size": metadata.count("expert_feed_forward_length")}
    return {**_experts(metadata, common, "num_experts"), **own}


def qwen3vlmoe(metadata: Metadata, common: Entries) -> Entries:
    """Entries of Qwen3-VL's mixtures, whose texts are Qwen3-MoE's."""
    return {**pictured(metadata, common), **qwen3moe(metadata, common)}


def gpt_oss(metadata: Metadata, common: Entries) -> Entries:
    """GPT-OSS's own entries; layers with a window and without take turns."""
    return {
        **_experts(metadata, common, gating=CHOSEN),
        **_windows(metadata, common, period=2, default=0),
        "intermediate_size": metadata.count("expert_feed_forward_length"),
    }


def lfm2(metadata: Metadata, common: Entries) -> Entries:
    """LFM2's own entries."""
    return {
        "layer_types": _without_keys(metadata, common, "conv"),
        "norm_eps": common["rms_norm_eps"],
        "conv_L_cache": metadata.count("shortconv.l_cache"),
        "conv_bias": False,
        "block_auto_adjust_ff_dim": False,
    }


def lfm2moe(metadata: Metadata, common: Entries) -> Entries:
    """LFM2-MoE's own entries."""
    metadata.expect("expert_weights_norm", True)
    metadata.expect("expert_weights_scale", 1.0)  # llama.cpp reads no other
    return {
        **lfm2(metadata, common),
        **_experts(metadata, common, "num_experts", SIGMOID),
        "norm_topk_prob": True,
        "moe_intermediate_size": metadata.count("expert_feed_forward_length"),
        "num_dense_layers": metadata.optional(int, "leading_dense_block_count") or 0,
    }


def qwen35(metadata: Metadata, common: Entries) -> Entries:
    """Qwen3.5's own entries."""
    predicting = metadata.optional(int, PREDICTING) or 0
    if not 0 <= predicting < common["num_hidden_layers"]:  # before any list of layers is made
        raise metadata.refusal(PREDICTING, f"is {predicting} of {common['num_hidden_layers']} layers, which")
    layers = common["num_hidden_layers"] - predicting
    interval = metadata.optional(int, "full_attention_interval") or 4
    key = "attention.recurrent_layers"
    states = metadata.listed(key) or [(layer + 1) % interval != 0 for layer in range(layers)]
    if len(states) < layers:
        raise metadata.refusal(key, f"lists {len(states)} layers, which")
    values, width, keys, key_width = _recurrence(metadata)
    if values % keys:
        raise metadata.refusal("ssm.time_step_rank", f"is {values} for {keys} groups, which")
    metadata.ignore(("rope.dimension_sections",))  # those of a text are all at one position
    return {
        "num_hidden_layers": layers,
        "layer_types": ["linear_attention" if state else "full_attention" for state in states[:layers]],
        "linear_num_key_heads": keys,
        "linear_num_value_heads": values,
        "linear_key_head_dim": key_width,
        "linear_value_head_dim": width,
        "linear_conv_kernel_dim": metadata.count("ssm.conv_kernel"),
    }


def qwen35moe(metadata: Metadata, common: Entries) -> Entries:
    """Qwen3.5-MoE's and Qwen3-Next's own entries."""
    metadata.expect("expert_weights_norm", True)
    return {
        **qwen35(metadata, common),
        **_experts(metadata, common, "num_experts"),
        "moe_intermediate_size": metadata.count("expert_feed_forward_length"),
        "shared_expert_intermediate_size": metadata.count("expert_shared_feed_forward_length"),
    }


def granitehybrid(metadata: Metadata, common: Entries) -> Entries:
    """Granite-4's own entries."""
    shared = metadata.optional(int, "expert_shared_feed_forward_length") or common["intermediate_size"]
    experts = _experts(metadata, common) if metadata.optional(int, "expert_count") else {"num_local_experts": 0}
    metadata.expect("ssm.group_count", 1)  # llama.cpp norms the groups apart, transformers all as one
    rotated = metadata.optional(bool, "rope.scaling.finetuned")
    heads, width, _, states = _recurrence(metadata)
    return {
        **_granite_factors(metadata),
        "position_embedding_type": "nope" if rotated is False else "rope",
        "layer_types": _without_keys(metadata, common, "linear_attention"),
        **experts,
        "shared_intermediate_size": shared,
        "mamba_n_heads": heads,
        "mamba_d_head": width,
        "mamba_n_groups": 1,
        "mamba_d_state": states,
        "mamba_d_conv": metadata.count("ssm.conv_kernel"),
        "mamba_expand": heads * width // common["hidden_size"],
    }


def falcon_h1(metadata: Metadata, common: Entries) -> Entries:
    """Entries of Falcon-H1, whose factors are within the weights of its files."""
    heads, width, groups, states = _recurrence(metadata)
    normed = metadata.has("blk.0.ssm_norm.weight")
    if normed:
        metadata.expect("ssm.group_count", 1)
    return {
        "mamba_d_ssm": heads * width,
        "mamba_n_heads": heads,
        "mamba_d_head": width,
        "mamba_n_groups": groups,
        "mamba_d_state": states,
        "mamba_d_conv": metadata.count("ssm.conv_kernel"),
        "mamba_rms_norm": normed,
        "mamba_norm_before_gate": False,
    }


def _recurrence(metadata: Metadata) -> tuple[int, int, int, int]:
    """The number and the width of a recurrence's heads, and the number and the width of the groups that share keys."""
    heads, inner = metadata.count("ssm.time_step_rank"), metadata.count("ssm.inner_size")
    if inner % heads:
        raise metadata.refusal("ssm.inner_size", f"is {inner} for {heads} heads, which")
    groups, states = metadata.count("ssm.group_count"), metadata.count("ssm.state_size")
    # transformers makes vectors of these lengths for each layer before the tensors are looked at.
    if inner + groups * states > metadata.largest:
        raise metadata.refusal("ssm.inner_size", f"is {inner} beside {groups} groups of {states}, which")
    return heads, inner // heads, groups, states


def _without_keys(metadata: Metadata, common: Entries, mixer: str) -> list[str]:
    """The type of every layer: `mixer` where it has no key-value heads, else `full_attention`."""
    layers = common["num_hidden_layers"]
    heads = metadata.listed(KV_HEADS) or [1] * layers
    if len(heads) != layers:
        raise metadata.refusal(KV_HEADS, f"lists {len(heads)} layers, which")
    return ["full_attention" if count else mixer for count in heads]
