"""Weights and metadata of `.gguf` files, where these differ from transformers'."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

ARCHITECTURES = {
    "mistral": "llama",
    "gemma3_text": "gemma3",
    "gpt_oss": "gpt-oss",
    "gemma4_text": "gemma4",
    "ministral3": "mistral3",
    "mixtral": "llama",
    "glm": "chatglm",
    "hunyuan_v1_dense": "hunyuan-dense",
    "olmo3": "olmo2",
    "lfm2_moe": "lfm2moe",
    "qwen3_moe": "qwen3moe",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "qwen3_next": "qwen3next",
    "falcon_h1": "falcon-h1",
    "granitemoehybrid": "granitehybrid",
    "granitemoeshared": "granitemoe",
}
"""Names of architectures that differ from transformers' type."""
PREDICTING = {
    "mtp.fc": "eh_proj",
    "mtp.pre_fc_norm_embedding": "enorm",
    "mtp.pre_fc_norm_hidden": "hnorm",
    "mtp.norm": "shared_head_norm",
}
"""Modules of an MTP layer beside its decoder layer, which is one more layer of the model in files."""
MAMBA = ("granitehybrid", "falcon-h1")
HEADS = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
ALTERNATING = (
    *("llama", "mistral3", "internlm2", "arcee", "granite", "minicpm", "granitemoe", "granitehybrid", "smollm3"),
)
"""Architectures whose rotations pair neighbouring columns."""


def shaped(architecture: str, stored: str, values: torch.Tensor) -> torch.Tensor:
    """Numbers in the shape of files: convolutions without a dimension, Mamba-2's numbers per head with one more."""
    if architecture in MAMBA and stored.endswith(("ssm_a", "ssm_d")):
        return values[:, None]
    if architecture in MAMBA and "ssm_norm" in stored:
        return values[None]
    return values.squeeze(1) if "conv" in stored and values.ndim == 3 else values


def ordered(model: PreTrainedModel, architecture: str, name: str, rows: torch.Tensor, undo: bool) -> torch.Tensor:
    """A parameter in the order of files, or back.

    Rotations may pair neighbouring columns of queries and keys. Value heads of a gated delta net take turns among key
    heads.
    """
    config, last = model.config, name.split(".")[-2]
    if architecture in ALTERNATING and last in HEADS:
        heads = getattr(config, HEADS[last])
        parts = rows.unflatten(0, (heads, -1, 2) if undo else (heads, 2, -1))
        return parts.transpose(1, 2).reshape(rows.shape).contiguous()
    if "linear_attn" not in name or last == "norm" or architecture == "qwen3next":
        return rows
    if last == "out_proj":
        return _taking_turns(config, rows.T, undo).T.contiguous()
    both = 2 * config.linear_num_key_heads * config.linear_key_head_dim if last in ("in_proj_qkv", "conv1d") else 0
    return torch.cat([rows[:both], _taking_turns(config, rows[both:], undo)])


def ungrouped(config: Any) -> torch.Tensor:
    """The places in Qwen3-Next's projection of all q, k, v and z, which files hold one after the other."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    width, own = config.linear_key_head_dim, values // keys * config.linear_value_head_dim
    places = torch.arange(2 * keys * (width + own)).view(keys, -1)
    return torch.cat([part.flatten() for part in places.split([width, width, own, own], 1)])


def _taking_turns(config: Any, rows: torch.Tensor, undo: bool) -> torch.Tensor:
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    sizes = (values // keys, keys) if undo else (keys, values // keys)
    return rows.unflatten(0, (*sizes, -1)).transpose(0, 1).reshape(rows.shape)


def gemma4(config: Any) -> dict[str, Any]:
    """The metadata of Gemma-4, many of whose sizes differ by layer; its configuration has the sliding layers'."""
    slides = [kind == "sliding_attention" for kind in config.layer_types]
    owning = len(slides) - config.num_kv_shared_layers
    inner, own = config.intermediate_size, config.per_layer_config
    double = [inner if layer < owning else 2 * inner for layer in range(len(slides))]
    width = own["full_attention"].head_dim
    return {
        "attention.head_count_kv": [own[layer].num_key_value_heads for layer in range(len(slides))],
        "attention.shared_kv_layers": config.num_kv_shared_layers,
        "attention.sliding_window_pattern": slides,
        "attention.key_length_swa": config.head_dim,
        "attention.value_length_swa": config.head_dim,
        "attention.key_length": width,
        "attention.value_length": width,
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input,
        "feed_forward_length": double if config.use_double_wide_mlp else inner,
        "rope.dimension_count": width,
        "rope.dimension_count_swa": config.head_dim,
    }


def mixers(config: Any, architecture: str) -> dict[str, Any]:
    """The metadata of hybrids about layers with another mixer than attention."""
    attends = [kind == "full_attention" for kind in getattr(config, "layer_types", None) or ()]
    by_layer = {"attention.head_count_kv": [config.num_key_value_heads if each else 0 for each in attends]}
    if architecture.startswith("lfm2"):
        own = {"shortconv.l_cache": config.conv_L_cache, "vocab_size": config.vocab_size}
        if architecture == "lfm2moe":  # 2 is a sigmoid
            own |= {"leading_dense_block_count": config.num_dense_layers, "expert_gating_func": 2}
        return {**by_layer, **own}
    if architecture in MAMBA:
        own = {
            "ssm.conv_kernel": config.mamba_d_conv,
            "ssm.state_size": config.mamba_d_state,
            "ssm.group_count": config.mamba_n_groups,
            "ssm.inner_size": config.mamba_n_heads * config.mamba_d_head,
            "ssm.time_step_rank": config.mamba_n_heads,
        }
        if architecture == "falcon-h1":
            return own
        return {
            **by_layer,
            **own,
            "expert_used_count": config.num_experts_per_tok if config.num_local_experts else 0,
            "rope.scaling.finetuned": config.position_embedding_type == "rope",
        }
    if not architecture.startswith(("qwen35", "qwen3next")):
        return {}
    return {
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "attention.recurrent_layers": [not each for each in attends],
        "full_attention_interval": 4,
        "rope.dimension_sections": [11, 11, 10, 0],
    }


def rope(config: Any, width: int) -> dict[str, Any]:
    """Metadata of the angles."""
    parameters = config.rope_parameters
    whole = parameters.get("full_attention", parameters)
    kind = whole["rope_type"]
    partial = whole.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1.0
    keys = {
        "rope.dimension_count": int(width * partial),
        "rope.freq_base": whole["rope_theta"],
        "rope.freq_base_swa": parameters["sliding_attention"]["rope_theta"] if whole is not parameters else None,
    }
    if kind == "dynamic":  # HunYuan's
        keys["rope.freq_base"] *= whole["alpha"] ** (width / (width - 2))
    if kind in ("linear", "yarn"):
        keys |= {"rope.scaling.type": kind, "rope.scaling.factor": whole["factor"]}
    if kind in ("yarn", "longrope"):
        keys["rope.scaling.original_context_length"] = whole["original_max_position_embeddings"]
    if kind == "yarn":
        names = {"attention_factor": "attn_factor", "beta_fast": "beta_fast", "beta_slow": "beta_slow"}
        keys |= {f"rope.scaling.yarn_{key}": whole.get(name) for name, key in names.items()}
    if whole.get("llama_4_scaling_beta"):  # files of models without it lack the key
        keys |= {"attention.temperature_scale": whole["llama_4_scaling_beta"], "rope.scaling.yarn_log_multiplier": 1.0}
    if kind == "longrope":
        original = whole["original_max_position_embeddings"]
        factor = whole.get("factor") or config.max_position_embeddings / original
        keys["rope.scaling.attn_factor"] = math.sqrt(1 + math.log(factor) / math.log(original))
    return keys


def rope_factors(model: PreTrainedModel) -> dict[str, NDArray[Any]]:
    """The factors of Llama 3's scaling and of longrope, which files hold as tensors."""
    parameters = model.config.rope_parameters
    kind = parameters.get("rope_type")
    if "full_attention" in parameters and parameters["full_attention"]["rope_type"] == "proportional":
        frequencies = model.model.rotary_emb.full_attention_inv_freq
        return {"rope_freqs.weight": np.where(frequencies.numpy() == 0, 1e30, 1.0)}
    if kind == "longrope":
        return {f"rope_factors_{length}.weight": parameters[f"{length}_factor"] for length in ("short", "long")}
    if kind != "llama3":
        return {}
    scaled = model.model.rotary_emb.inv_freq.double().numpy()
    plain = parameters["rope_theta"] ** (-np.arange(0, 1, 1 / len(scaled)))
    return {"rope_freqs.weight": plain / scaled}
