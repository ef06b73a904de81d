"""The configuration of a `.gguf` file's model."""

from __future__ import annotations

from typing import Any

import numpy as np
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig

from ssd_profiles.errors import UserError, first_line
from ssd_runtime.loading.checkpoints.config import require_sizes
from ssd_runtime.loading.gguf.architectures import Architecture, architecture_of, blocks_of
from ssd_runtime.loading.gguf.entries import KV_HEADS, QUERY_SCALING, Entries
from ssd_runtime.loading.gguf.metadata import Metadata
from ssd_runtime.loading.gguf.rope import BASE, FACTORS, rope_parameters
from ssd_runtime.weights.gguf.file import EMBEDDING, HEAD
from ssd_runtime.weights.gguf.header import ADVICE
from ssd_runtime.weights.gguf.index import GgufIndex

HARMLESS = ("vocab_size", "pooling_type", "attention.layer_norm_epsilon")
"""Keys that say again what tensors say, or that matter to embedding models or other norms alone."""
NO_EXPERTS = ("expert_count", "expert_used_count")
ROTATED_IN_PART = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "glm", "glm4")
"""Types of configurations that rotate a part of each head unless they say otherwise."""
PARTLY_ROTATED = ("phi3", *ROTATED_IN_PART)
"""Types of configurations that can rotate a part of each head."""
SCALED_IN_PART = ("gemma3_text", "olmo3")
"""Types of configurations that scale the angles of layers without a window alone."""
WIDEST_HEAD = 4096
UNROTATED = float(np.float32(1e30))
"""The divisor of angles that leaves columns as they are."""


def gguf_config(index: GgufIndex) -> PreTrainedConfig:
    """Make the configuration of a file's model.

    Raises UserError for architectures and metadata that are not known here, and for sizes that contradict each other.
    """
    architecture = architecture_of(index)
    kind = index.metadata.get("general.type", "model")
    if kind != "model":
        raise UserError(f"{index.path}: holds {kind!r}, not a model; give the model's own file")
    try:
        entries = _entries(index, architecture)
        return AutoConfig.for_model(entries.pop("model_type"), **entries)
    except (ValueError, TypeError, ArithmeticError, LookupError, AttributeError, StrictDataclassError) as error:
        raise UserError(f"{index.path}: its metadata is not a model's ({first_line(error)}); {ADVICE}") from None


def _entries(index: GgufIndex, architecture: Architecture) -> Entries:
    metadata = Metadata(index, index.architecture, architecture.by_layer)
    entries = _common(index, metadata)
    biases = {name.split(".", 2)[-1] for name in index.tensors if name.endswith(".bias")}
    entries |= {
        entry: any(f"{name}.bias" in biases for name in names) for entry, names in (architecture.biases or {}).items()
    }
    entries = {"model_type": architecture.model_type, **entries, **architecture.entries(metadata, entries)}
    entries["rope_parameters"] = _rope(index, metadata, entries)
    metadata.ignore(HARMLESS)
    metadata.expect("attention.causal", True)
    metadata.expect("use_parallel_residual", False)
    if not {"num_experts_per_tok", "top_k_experts"} & entries.keys():
        for key in NO_EXPERTS:
            metadata.expect(key, 0)
    metadata.require_all_taken()
    require_sizes(f"{index.path}: its metadata", entries, len(index.tensors), index.dense_bytes)
    return entries


def _common(index: GgufIndex, metadata: Metadata) -> Entries:
    embedding = index.tensors.get(EMBEDDING)
    if embedding is None or len(embedding.shape) != 2:
        raise UserError(f"{index.path}: has no embedding ({EMBEDDING}); {ADVICE}")
    hidden, heads = metadata.count("embedding_length"), metadata.count("attention.head_count")
    if hidden != embedding.shape[1] or heads > hidden:
        raise UserError(
            f"{index.path}: says {heads} heads and a hidden size of {hidden}, but {EMBEDDING} is "
            f"{list(embedding.shape)}; convert it again"
        )
    layers = metadata.count("block_count")
    normed = {
        number
        for number, names in blocks_of(index).items()
        if any("norm" in name and index.tensors[name].shape == (hidden,) for name in names)
    }
    if (missing := next((number for number in range(layers) if number not in normed), None)) is not None:
        raise UserError(
            f"{index.path}: has no norm of block {missing}, and says that there are {layers}; download it again"
        )
    kv_heads = metadata.optional(int, KV_HEADS, beside=0) or heads
    if kv_heads < 1 or heads % kv_heads:
        raise metadata.refusal(KV_HEADS, f"is {kv_heads} for {heads} heads, which")
    width = metadata.optional(int, "attention.key_length")
    values = metadata.optional(int, "attention.value_length")
    width = hidden // heads if width is None else width
    if values not in (None, width):
        raise metadata.refusal("attention.value_length", f"is {values} and not the keys', which")
    if not 1 <= width <= WIDEST_HEAD:
        raise metadata.refusal("attention.key_length", f"is {width}, which")
    return {
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": _inner(metadata),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": width,
        "max_position_embeddings": metadata.count("context_length"),
        "rms_norm_eps": metadata.required(float, "attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": HEAD not in index.tensors,
        "bos_token_id": None,  # the vocabulary says these; a family's own would name other tokens
        "eos_token_id": None,
        "pad_token_id": None,
    }


def _inner(metadata: Metadata) -> int:
    """The inner size of an MLP block, or of an expert where no block is without experts."""
    of_expert = metadata.optional(int, "expert_feed_forward_length")
    return metadata.optional(int, "feed_forward_length") or of_expert or metadata.count("feed_forward_length")


def _rope(index: GgufIndex, metadata: Metadata, entries: Entries) -> dict[str, Any]:
    width, context = entries["head_dim"], entries["max_position_embeddings"]
    if entries["model_type"] == "gemma4_text":
        return _gemma4_rope(index, metadata, entries)
    rotated = metadata.optional(int, "rope.dimension_count") or width
    if rotated % 2 or rotated > width or (rotated != width and entries["model_type"] not in PARTLY_ROTATED):
        raise metadata.refusal("rope.dimension_count", f"is {rotated} for heads of {width}, which")
    metadata.expect("rope.dimension_count_swa", rotated)
    parameters = rope_parameters(index, metadata, rotated // 2, context)
    if entries["model_type"] == "ministral3":
        parameters.setdefault("original_max_position_embeddings", context)
        parameters["llama_4_scaling_beta"] = metadata.required(float, QUERY_SCALING)
    if entries["model_type"] == "gpt_oss" and parameters["rope_type"] == "yarn":
        parameters["truncate"] = False  # the model's own; files do not say
    if rotated != width or entries["model_type"] in ROTATED_IN_PART:
        entries["partial_rotary_factor"] = parameters["partial_rotary_factor"] = rotated / width
    if parameters["rope_type"] == "longrope":
        entries["original_max_position_embeddings"] = parameters["original_max_position_embeddings"]
    local = metadata.optional(float, "rope.freq_base_swa")
    if entries["model_type"] not in SCALED_IN_PART:
        if local not in (None, parameters["rope_theta"]):
            raise metadata.refusal("rope.freq_base_swa", f"is {local}, which")
        return parameters
    if local is None:
        local = parameters["rope_theta"] if entries["model_type"] == "olmo3" else BASE
    return {"full_attention": parameters, "sliding_attention": {"rope_type": "default", "rope_theta": local}}


def _gemma4_rope(index: GgufIndex, metadata: Metadata, entries: Entries) -> dict[str, Any]:
    """The rotations of Gemma-4: layers without a window have tensors of factors that leave a part of a head alone."""
    [width] = {own["head_dim"] for own in entries["per_layer_config"].values()} or {entries["head_dim"]}
    metadata.expect("rope.dimension_count", width)
    metadata.expect("rope.dimension_count_swa", entries["head_dim"])
    parameters = rope_parameters(index, metadata, width // 2, entries["max_position_embeddings"])
    factors = parameters.get("short_factor", [1.0] * (width // 2))
    rotated = factors.count(1.0)
    if factors != [1.0] * rotated + [max(factors)] * (width // 2 - rotated) or max(factors) not in (1.0, UNROTATED):
        raise UserError(f"{index.path}: {FACTORS} has unknown factors; convert it with llama.cpp")
    local = metadata.optional(float, "rope.freq_base_swa")
    return {
        "full_attention": {
            "rope_type": "proportional",
            "rope_theta": parameters["rope_theta"],
            "partial_rotary_factor": 2 * rotated / width,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": BASE if local is None else local},
    }
