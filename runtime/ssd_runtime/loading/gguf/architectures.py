"""The architectures whose `.gguf` files are served, and how their files differ from transformers' models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ssd_profiles.errors import UserError
from ssd_runtime.loading.gguf.metadata import Metadata
from ssd_runtime.weights.gguf.file import TRANSFORMERS, Layout
from ssd_runtime.weights.gguf.index import GgufIndex

Entries = dict[str, Any]
"""Entries of a transformers configuration by name."""
SOFTMAX = 1
"""The number of llama.cpp for a router whose weights are a softmax."""
BLOCK_BIASES = {"attention_bias": ("attn_q", "attn_k", "attn_v", "attn_output")}
MLP_BIASES = {"mlp_bias": ("ffn_gate", "ffn_up", "ffn_down")}


def _none(metadata: Metadata, common: Entries) -> Entries:
    return {}


def _llama(metadata: Metadata, common: Entries) -> Entries:
    metadata.expect("tensor_data_layout", "Meta AI original pth")
    window = metadata.optional(int, "attention.sliding_window")
    # llama.cpp's converter writes Mistral's models as this architecture, too.
    if metadata.optional(int, "expert_count"):
        return {**_experts(metadata, common), "model_type": "mixtral", "sliding_window": window or None}
    return {"model_type": "mistral", "sliding_window": window} if window else {}


def _phi3(metadata: Metadata, common: Entries) -> Entries:
    window = metadata.optional(int, "attention.sliding_window")
    return {"sliding_window": window or None}


def _gemma2(metadata: Metadata, common: Entries) -> Entries:
    return {
        **_gemma(metadata, common, large=46, cap=30.0),
        **_windows(metadata, common, period=2, default=4096),
        "attn_logit_softcapping": _cap(metadata, "attn_logit_softcapping", 50.0),
    }


def _gemma3(metadata: Metadata, common: Entries) -> Entries:
    metadata.expect("attn_logit_softcapping")
    return {**_gemma(metadata, common, large=62, cap=0.0), **_windows(metadata, common, period=6, default=0)}


def _gemma(metadata: Metadata, common: Entries, large: int, cap: float) -> Entries:
    """Entries of both generations: the scale of scores is another one in the largest model, of `large` layers."""
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
    if len(listed) != layers:
        raise metadata.refusal(key, f"lists {len(listed)} layers, which")
    kinds = ["sliding_attention" if window and slides else "full_attention" for slides in listed]
    return {"layer_types": kinds, "sliding_window": window or None}


def _granite(metadata: Metadata, common: Entries) -> Entries:
    metadata.expect("rope.scaling.finetuned", True)  # without it the architecture has no rotation
    names = {
        "attention.scale": "attention_multiplier",
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "logit_scale": "logits_scaling",
    }
    found = {name: metadata.optional(float, key) for key, name in names.items()}
    return {name: value for name, value in found.items() if value}


def _granitemoe(metadata: Metadata, common: Entries) -> Entries:
    metadata.expect("expert_shared_feed_forward_length", 0)
    return {**_granite(metadata, common), **_experts(metadata, common)}


def _experts(metadata: Metadata, common: Entries, count: str = "num_local_experts") -> Entries:
    """Entries of a mixture, whose router weighs experts by a softmax; `count` is the entry with their number."""
    metadata.expect("expert_gating_func", SOFTMAX)
    return {count: metadata.count("expert_count"), "num_experts_per_tok": metadata.count("expert_used_count")}


def _olmoe(metadata: Metadata, common: Entries) -> Entries:
    metadata.expect("expert_weights_norm", False)
    return {**_experts(metadata, common, "num_experts"), "norm_topk_prob": False}


def _qwen3moe(metadata: Metadata, common: Entries) -> Entries:
    metadata.expect("expert_weights_norm", True)
    own = {"norm_topk_prob": True, "moe_intermediate_size": metadata.count("expert_feed_forward_length")}
    return {**_experts(metadata, common, "num_experts"), **own}


@dataclass(frozen=True, slots=True)
class Architecture:
    """An architecture of files: the family that serves it, and what its files do differently."""

    model_type: str
    """The type of transformers' configuration."""
    layout: Layout = TRANSFORMERS
    biases: Mapping[str, tuple[str, ...]] | None = None
    """Entries of the configuration that give a bias to projections, by the names of these in the file."""
    entries: Callable[[Metadata, Entries], Entries] = _none
    """Takes the metadata that only this architecture has; returns further entries of the configuration."""


ARCHITECTURES = {
    "llama": Architecture("llama", Layout(pairs_alternate=True), {**BLOCK_BIASES, **MLP_BIASES}, _llama),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3", biases=BLOCK_BIASES),
    "phi3": Architecture("phi3", entries=_phi3),
    "gemma2": Architecture("gemma2", Layout(norm_offset=1.0), BLOCK_BIASES, _gemma2),
    "gemma3": Architecture("gemma3_text", Layout(norm_offset=1.0), BLOCK_BIASES, _gemma3),
    "olmo2": Architecture("olmo2", biases=BLOCK_BIASES),
    "granite": Architecture("granite", Layout(pairs_alternate=True), {**BLOCK_BIASES, **MLP_BIASES}, _granite),
    "granitemoe": Architecture("granitemoe", Layout(pairs_alternate=True), BLOCK_BIASES, _granitemoe),
    "olmoe": Architecture("olmoe", biases=BLOCK_BIASES, entries=_olmoe),
    "qwen3moe": Architecture("qwen3_moe", biases=BLOCK_BIASES, entries=_qwen3moe),
    "smollm3": Architecture("smollm3", Layout(pairs_alternate=True), {**BLOCK_BIASES, **MLP_BIASES}),
}
"""Architectures by the name that llama.cpp gives them."""


def architecture_of(index: GgufIndex) -> Architecture:
    """The architecture of a file. Raises UserError if it is not served."""
    found = ARCHITECTURES.get(index.architecture)
    if found is None:
        served = ", ".join(ARCHITECTURES)
        raise UserError(f"{index.path}: files of architecture {index.architecture} are not supported, only {served}")
    return found
