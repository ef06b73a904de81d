"""The configuration of a model folder: the entries that matter, in bounds that the folder's tensors set."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ssd_artifacts.fingerprint import COMPUTATION
from ssd_profiles.errors import UserError
from ssd_runtime.loading.checkpoints.folder import ADVICE, CONFIG, guarded_loading, read_settings
from ssd_runtime.model.family.families import FAMILIES, family_of
from ssd_runtime.model.family.layer_kinds import key_heads

TAKEN = COMPUTATION | {
    *("dtype", "torch_dtype", "quantization_config", "tokenizer_class"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
    # Files of earlier versions name parts of the computation so.
    *("rope_local_base_freq", "sliding_window_pattern", "_sliding_window_pattern", "no_rope_layer_interval"),
    *("full_attn_idxs", "block_ff_dim", "tie_embedding", "full_attention_interval", "layers_block_type"),
    # A model with such an entry computes something else, which the check against the model itself finds.
    *("is_causal", "attention_chunk_size"),
}
"""Entries that transformers receives. Others may name code, kernels on the Hub, files, or sizes of what is not used."""
TEXT_PARTS = {
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "gemma3": "gemma3_text",
    "gemma4": None,
    "mistral3": None,
}
"""`model_type` of the text part, by that of the vision-language model; None if the file names it."""
OF_THE_WHOLE = ("dtype", "torch_dtype", "tie_word_embeddings", "quantization_config", "auto_map")
"""Entries that a vision-language model's configuration keeps outside its text part."""
SIZES = (
    *("hidden_size", "intermediate_size", "vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("moe_intermediate_size", "shared_expert_intermediate_size", "num_experts_per_tok", "decoder_sparse_step"),
    *("conv_L_cache", "block_multiple_of", "shared_intermediate_size", "linear_conv_kernel_dim"),
    *("linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads", "linear_num_value_heads"),
    *("mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_conv", "mamba_d_ssm"),
    *("global_head_dim", "num_global_key_value_heads", "vocab_size_per_layer_input", "top_k_experts"),
)
DEFAULTED = (
    *("num_key_value_heads", "head_dim", "global_head_dim", "num_global_key_value_heads"),
    *("moe_intermediate_size", "top_k_experts", "vocab_size_per_layer_input", "mamba_d_ssm"),
)
"""Sizes that may be null."""
LONGEST = 1 << 30
"""Most positions of a model."""
LISTED = ("layer_types", "layers_block_type", "no_rope_layers")
"""Entries that list something for every layer."""
FLOATS = ("Infinity", "-Infinity", "NaN")
"""Names of the floats that JSON has not."""
MOST_NUMBER = 1 << 53
ANGLES = (
    *("rope_theta", "rope_local_base_freq", "factor", "short_factor", "long_factor"),
    *("attention_factor", "beta_fast", "beta_slow"),
)
"""Entries about rotations that are above zero."""
RANGES = {
    "num_hidden_layers": (1, 1024),  # each takes a hundred kilobytes before a weight is read
    "rms_norm_eps": (0.0, 1.0),
    "partial_rotary_factor": (1e-6, 1.0),
    # Tables of longrope hold all of these positions.
    "original_max_position_embeddings": (1, 1 << 20),
    "num_experts": (1, 4096),
    "hidden_size_per_layer_input": (0, LONGEST),
    "num_kv_shared_layers": (0, LONGEST),
    "num_dense_layers": (0, LONGEST),
    "num_local_experts": (0, 4096),  # 0 in dense Granite-4 hybrids
    "time_step_limit": (0.0, math.inf),
    **dict.fromkeys(ANGLES, (1e-3, MOST_NUMBER)),
    **dict.fromkeys(("sliding_window", "no_rope_layer_interval"), (1, LONGEST)),
    "sliding_window_pattern": (0, LONGEST),  # EXAONE-4 writes 0 for models without windows
}
"""Least and most of numbers, by the entry that holds them."""


def read_config(spec: str, folder: Path, most_layers: int, most_size: int) -> PreTrainedConfig:
    """The configuration of the model `spec`, whose files hold `most_layers` tensors of `most_size` numbers in all.

    Raises UserError for models that are not supported or need code of their own, which is never run, and for sizes that
    these files cannot have.
    """
    raw = _text_part(read_settings(spec, folder / CONFIG))
    kind = raw.get("model_type")
    _require_own_code_unneeded(spec, raw)
    with guarded_loading(spec):
        kept = {name: _decoded(value) for name, value in raw.items() if name in TAKEN and name != "model_type"}
        if kind != "gemma4_text":  # transformers would change layers of any family by it
            kept.pop("per_layer_config", None)
        require_sizes(f"{spec}: {CONFIG}", kept, most_layers, most_size)
        # transformers reads such a config as another family's.
        kind = "ministral" if kind == "mistral" and kept.get("layer_types") is not None else kind
        if kind not in FAMILIES:
            family_of(PreTrainedConfig(model_type=str(kind)[:40]))
        config: PreTrainedConfig = AutoConfig.for_model(kind, **kept, name_or_path=str(folder))
        config.architectures = None
        family_of(config)
        _require_heads(spec, config)
    return config


def _text_part(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The text part of a vision-language model's configuration; other configurations unchanged."""
    text, whole = raw.get("text_config"), str(raw.get("model_type"))
    if whole not in TEXT_PARTS or not isinstance(text, dict):
        return raw
    kind = TEXT_PARTS[whole] or text.get("model_type")
    return {**text, **{name: raw[name] for name in OF_THE_WHOLE if name in raw}, "model_type": kind}


def _require_own_code_unneeded(spec: str, raw: Mapping[str, Any]) -> None:
    """Raise UserError for a model that transformers does not know, or not under the name of its class."""
    if "auto_map" not in raw:
        return
    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(str(raw.get("model_type")))
    if known is None or (raw.get("architectures") and known not in raw["architectures"]):
        raise UserError(
            f"{spec}: needs code of its own ({CONFIG}: auto_map), which is never run; give a model of a family that "
            "transformers knows"
        )


def require_sizes(where: str, entries: Mapping[str, Any], most_layers: int, most_size: int) -> None:
    """Raise UserError for a size that is no whole number, or none of a model of `most_layers` tensors.

    These have `most_size` numbers in all. The error says `where` the entries are.
    """
    for name in SIZES:
        value = entries.get(name)
        if entries.get("num_local_experts") == 0:
            is_of_none = name == "num_experts_per_tok"  # dense Granite-4 models have 0 of 0 experts
        else:
            is_of_none = name == "shared_intermediate_size" and value == 0  # no expert that all rows go to
        if not (is_of_none or (name in DEFAULTED and value is None)):
            _require_count(where, entries, name, most_size)
    layers = _require_count(where, entries, "num_hidden_layers", most_layers)
    by_layer = {} if entries.get("per_layer_config") is None else entries["per_layer_config"]
    # transformers pads the numbers of layers with zeros.
    numbers = [key.lstrip("0") or key[-1:] for key in by_layer] if isinstance(by_layer, dict) else [""]
    if not set(numbers) <= set(map(str, range(layers))) or len(set(numbers)) < len(numbers):
        raise _refusal(where, "per_layer_config", "is no map of layers")
    for own in by_layer.values():
        if not isinstance(own, dict) or not set(own) <= set(DEFAULTED[:2]):
            raise _refusal(where, "per_layer_config", f"has more than {' and '.join(DEFAULTED[:2])}")
        for name in own:
            _require_count(where, own, name, most_size)
    _require_count(where, entries, "max_position_embeddings", LONGEST)
    for name in LISTED:
        listed = entries.get(name)
        if listed is not None and (not isinstance(listed, list) or (listed and len(listed) != layers)):
            raise _refusal(where, name, "is no list of as many entries as layers")
    for name, value in _numbers(entries):
        least, most = RANGES.get(name, (-MOST_NUMBER, MOST_NUMBER))
        if not least <= value <= most:  # NaN is refused, too
            raise _refusal(where, name, f"has the number {str(value)[:40]}, expected {least:g} to {most:g}")


def _require_count(where: str, entries: Mapping[str, Any], name: str, most: int) -> int:
    """The value of an entry; 0 if it is absent. Raises UserError unless it is a whole number of at least 1."""
    if name not in entries:
        return 0
    value = entries[name]
    if type(value) is not int or not 1 <= value <= most:
        raise _refusal(where, name, f"is {str(value)[:40]!r}, expected 1 to {most}")
    return value


def _decoded(value: Any) -> Any:
    """An entry as transformers reads it, which writes infinity as `{"__float__": "Infinity"}`."""
    if isinstance(value, list):
        return [_decoded(each) for each in value]
    if not isinstance(value, dict):
        return value
    named = value.get("__float__")
    return float(named) if named in FLOATS else {name: _decoded(each) for name, each in value.items()}


def _numbers(value: Any, name: str = "") -> Iterator[tuple[str, int | float]]:
    """Every number at any depth, with the name of the entry that holds it."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _numbers(each, str(key))
    elif isinstance(value, list):
        for each in value:
            yield from _numbers(each, name)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield name, value


def _require_heads(spec: str, config: PreTrainedConfig) -> None:
    """Raise UserError for heads that cannot share keys, or that cannot be rotated."""
    heads = config.num_attention_heads
    for layer in range(config.num_hidden_layers):
        groups, width = key_heads(config, layer)
        if heads % groups or width < 1 or width % 2:
            raise UserError(f"{spec}: {CONFIG}: {heads} heads of {width} cannot share {groups} keys; {ADVICE}")


def _refusal(where: str, name: str, problem: str) -> UserError:
    return UserError(f"{where}: {name[:60]} {problem}; {ADVICE}")
