"""The architectures whose `.gguf` files are served, and how their files differ from transformers' models."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ssd_profiles.errors import UserError
from ssd_runtime.loading.gguf import entries as own
from ssd_runtime.loading.gguf.entries import GEMMA4_LISTS, PREDICTING, Entries
from ssd_runtime.loading.gguf.metadata import Metadata
from ssd_runtime.weights.gguf.index import GgufIndex
from ssd_runtime.weights.gguf.layout import TRANSFORMERS, Layout

BLOCK = re.compile(r"blk\.(\d{1,9})\.")
"""The beginning of the names of a block's tensors."""
BLOCK_BIASES = {"attention_bias": ("attn_q", "attn_k", "attn_v", "attn_qkv", "attn_output")}
QKV_BIASES = {"attention_bias": ("attn_q", "attn_k", "attn_v", "attn_qkv")}
MLP_BIASES = {"mlp_bias": ("ffn_gate", "ffn_up", "ffn_down")}


@dataclass(frozen=True, slots=True)
class Architecture:
    """An architecture of files: the family that serves it, and what its files do differently."""

    model_type: str
    """The type of transformers' configuration."""
    layout: Layout = TRANSFORMERS
    biases: Mapping[str, tuple[str, ...]] | None = None
    """Entries of the configuration that give a bias to projections, by the names of these in the file."""
    entries: Callable[[Metadata, Entries], Entries] = own.none
    """Takes the metadata that only this architecture has; returns further entries of the configuration."""
    by_layer: tuple[str, ...] = ()
    """Keys whose values may differ by layer."""


QWEN35 = Layout(norm_offset=1.0, values_alternate=True)
ARCHITECTURES = {
    "llama": Architecture("llama", Layout(pairs_alternate=True), {**BLOCK_BIASES, **MLP_BIASES}, own.llama),
    "mistral3": Architecture("ministral3", Layout(pairs_alternate=True), entries=own.mistral3),
    "internlm2": Architecture("llama", Layout(pairs_alternate=True)),
    "exaone": Architecture("llama"),
    "qwen2": Architecture("qwen2"),
    "qwen2vl": Architecture("qwen2", entries=own.pictured),
    "qwen3": Architecture("qwen3", biases=BLOCK_BIASES),
    "qwen3vl": Architecture("qwen3", biases=BLOCK_BIASES, entries=own.pictured),
    "phi3": Architecture("phi3", entries=own.phi3),
    "gemma2": Architecture("gemma2", Layout(norm_offset=1.0), BLOCK_BIASES, own.gemma2),
    "gemma3": Architecture("gemma3_text", Layout(norm_offset=1.0), BLOCK_BIASES, own.gemma3),
    "gemma4": Architecture("gemma4_text", entries=own.gemma4, by_layer=tuple(GEMMA4_LISTS)),
    "olmo2": Architecture("olmo2", biases=BLOCK_BIASES, entries=own.olmo2),
    "exaone4": Architecture("exaone4", entries=own.exaone4),
    "chatglm": Architecture("glm", biases=QKV_BIASES),
    "glm4": Architecture("glm4", biases=QKV_BIASES),
    "hunyuan-dense": Architecture("hunyuan_v1_dense", biases=BLOCK_BIASES),
    "minicpm": Architecture("granite", Layout(pairs_alternate=True), entries=own.minicpm),
    "granite": Architecture("granite", Layout(pairs_alternate=True), {**BLOCK_BIASES, **MLP_BIASES}, own.granite),
    "granitemoe": Architecture("granitemoe", Layout(pairs_alternate=True), BLOCK_BIASES, own.granitemoe),
    "olmoe": Architecture("olmoe", biases=BLOCK_BIASES, entries=own.olmoe),
    "qwen3moe": Architecture("qwen3_moe", biases=BLOCK_BIASES, entries=own.qwen3moe),
    "qwen3vlmoe": Architecture("qwen3_moe", biases=BLOCK_BIASES, entries=own.qwen3vlmoe),
    "gpt-oss": Architecture("gpt_oss", Layout(experts_alternate=True), BLOCK_BIASES, own.gpt_oss),
    "lfm2": Architecture("lfm2", entries=own.lfm2),
    "lfm2moe": Architecture("lfm2_moe", entries=own.lfm2moe),
    "qwen35": Architecture("qwen3_5_text", QWEN35, BLOCK_BIASES, own.qwen35),
    "qwen3next": Architecture("qwen3_next", Layout(norm_offset=1.0, gates_joined=True), BLOCK_BIASES, own.qwen35moe),
    "qwen35moe": Architecture("qwen3_5_moe_text", QWEN35, BLOCK_BIASES, own.qwen35moe),
    "granitehybrid": Architecture(
        "granitemoehybrid",
        Layout(pairs_alternate=True),
        {**BLOCK_BIASES, "mamba_conv_bias": ("ssm_conv1d",), "mamba_proj_bias": ("ssm_in",)},
        own.granitehybrid,
    ),
    "falcon-h1": Architecture("falcon_h1", biases={"mamba_conv_bias": ("ssm_conv1d",)}, entries=own.falcon_h1),
    "ernie4_5": Architecture("ernie4_5"),
    "seed_oss": Architecture(
        "seed_oss",
        biases={**QKV_BIASES, "attention_out_bias": ("attn_output",), **MLP_BIASES},
    ),
    "arcee": Architecture("arcee", Layout(pairs_alternate=True), {**BLOCK_BIASES, "mlp_bias": ("ffn_up", "ffn_down")}),
    "apertus": Architecture("apertus", biases=BLOCK_BIASES),
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


def blocks_of(index: GgufIndex) -> dict[int, list[str]]:
    """The names of a file's tensors by the number of their block; those of no block are left out."""
    found = dict[int, list[str]]()
    for name in index.tensors:
        if block := BLOCK.match(name):
            found.setdefault(int(block[1]), []).append(name)
    return found


def predicting_tensors(index: GgufIndex) -> list[str]:
    """The tensors of a file's last layers that predict further tokens, which decoding does not use."""
    count = index.metadata.get(f"{index.architecture}.{PREDICTING}")
    blocks = index.metadata.get(f"{index.architecture}.block_count")
    if not isinstance(count, int) or not isinstance(blocks, int):
        return []
    return [name for number, names in blocks_of(index).items() if blocks - count <= number < blocks for name in names]
