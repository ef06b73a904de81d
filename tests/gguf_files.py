"""Small `.gguf` files of tiny models, as llama.cpp's converter writes them, with random blocks of any type."""

from __future__ import annotations

import copy
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray
from transformers import PreTrainedModel

from ssd_runtime.loading.gguf.models import packed_model
from ssd_runtime.weights.gguf.file import GgufFile
from ssd_runtime.weights.gguf.index import GgufIndex
from tests.gguf_layouts import (
    ARCHITECTURES,
    PREDICTING,
    gemma4,
    mixers,
    ordered,
    rope,
    rope_factors,
    shaped,
    ungrouped,
)
from tests.models import tiny_model

SIZES: dict[str, Any] = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
"""Sizes whose weights the kernels take: groups of 32 columns, and 16 outputs at a time."""
MERGED = "<0><1>"
"""The token of the only merge, which every vocabulary has to have."""
DELTA_NETS = {"linear_num_key_heads": 4, "linear_num_value_heads": 16, "linear_value_head_dim": 16}
MAMBA = {"mamba_n_heads": 16, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_expand": 4}
"""Heads that our own code takes: keys and values of whole tiles of 16. Those of Qwen3.5 run in torch."""
FACTORS = (
    *("lm_head_multiplier", "embedding_multiplier", "key_multiplier", "attention_in_multiplier"),
    *("attention_out_multiplier", "ssm_in_multiplier", "ssm_out_multiplier"),
)
FACTOR_LISTS = {"mlp_multipliers": [1.0] * 2, "ssm_multipliers": [1.0] * 5}
"""Falcon-H1's factors, which files have within the weights."""
GEMMA4 = {"global_head_dim": 32, "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 96}
HYBRID_SIZES: dict[str, dict[str, Any]] = {
    "gemma4-shared-keys": GEMMA4,
    "gemma4-experts": {**GEMMA4, "moe_intermediate_size": 32},
    "lfm2": {"conv_bias": False, "block_auto_adjust_ff_dim": False},
    "lfm2-moe": {"moe_intermediate_size": 32, "routed_scaling_factor": 1.0},
    "qwen3.5": {**DELTA_NETS, "linear_value_head_dim": 8},
    "qwen3.5-moe": {**DELTA_NETS, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64},
    "falcon-h1": {**MAMBA, "mamba_n_groups": 2, "mamba_d_ssm": 256, **dict.fromkeys(FACTORS, 1.0), **FACTOR_LISTS},
    "qwen3-next": {
        **DELTA_NETS,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64,
        "mlp_only_layers": [],
    },
    "granite-hybrid": {"shared_intermediate_size": 96, **MAMBA},
    "granite-hybrid-experts": {"shared_intermediate_size": 64, **MAMBA},
}
"""Sizes of hybrids and of Gemma-4 for that."""
XIELU = ("alpha_p", "alpha_n", "beta", "eps")
"""The numbers of Apertus's activation."""
RENAMED = {
    "block_sparse_moe.router": "mlp.gate",
    ".router.scale": ".router.proj.scale",
    ".router.per_expert_scale": ".experts.down_proj.scale",
}
"""Parts of names that `gguf` does not know, and those that the converter puts in their place."""
ROUTERS = (".gate", "router.proj", "mlp.router", "shared_expert_gate")
"""Ends of the names of modules that files never quantise."""
OFFSET = ("gemma2", "gemma3", "qwen35", "qwen35moe", "qwen3next")
"""Architectures whose files add 1 to the weights of norms."""
SCALES = {
    Type.Q4_0: (0,),
    Type.Q4_1: (0, 2),
    Type.Q5_0: (0,),
    Type.Q5_1: (0, 2),
    Type.Q8_0: (0,),
    Type.Q2_K: (80, 82),
    Type.Q3_K: (108,),
    Type.Q4_K: (0, 2),
    Type.Q5_K: (0, 2),
    Type.Q6_K: (208,),
    Type.IQ2_XXS: (0,),
    Type.IQ2_XS: (0,),
    Type.IQ2_S: (0,),
    Type.IQ3_XXS: (0,),
    Type.IQ3_S: (0,),
    Type.IQ1_S: (0,),
    Type.IQ4_NL: (0,),
    Type.IQ4_XS: (0,),
    Type.TQ1_0: (52,),
    Type.TQ2_0: (64,),
}
"""Places of the fp16 numbers in a block of each type."""
EXPONENTS = {Type.MXFP4: (range(1), 122), Type.NVFP4: (range(4), 40)}
"""Places of the bytes that scale a block, and a small value of them."""


def random_blocks(kind: Type, rows: int, columns: int, spread: float = 0.3, seed: int = 0) -> NDArray[Any]:
    """Random blocks [rows, bytes] of a type whose weights are about as large as `spread`; numbers for dense types."""
    random = np.random.default_rng(seed)
    if kind in (Type.F32, Type.F16, Type.BF16):
        return np.asarray(quantize(random.normal(0, spread, (rows, columns)).astype(np.float32), kind))
    per, size = GGML_QUANT_SIZES[kind]
    data = random.integers(0, 256, (rows, columns // per, size), np.uint8)
    if kind in EXPONENTS:
        places, value = EXPONENTS[kind]
        data[..., places.start : places.stop] = value
        return data.reshape(rows, -1)
    scales = random.normal(0, 1, (*data.shape[:2], len(SCALES.get(kind, (0,)))))
    _set_scales(data, kind, scales)
    unit = np.std(dequantize(data.reshape(rows, -1), kind))
    _set_scales(data, kind, scales * spread / unit)
    return data.reshape(rows, -1)


def _set_scales(data: NDArray[Any], kind: Type, scales: NDArray[Any]) -> None:
    """Give `scales` [rows, n, numbers of a block] to blocks [rows, n, bytes]."""
    halves = scales.astype(np.float16)
    for number, at in enumerate(SCALES.get(kind, ())):
        data[..., at : at + 2] = halves[..., number : number + 1].view(np.uint8)
    if kind == Type.IQ1_M:  # the four bits at the top of four numbers are the scale
        bits = halves[..., 0].view(np.uint16)
        for part in range(4):
            data[..., 49 + 2 * part] = (data[..., 49 + 2 * part] & 15) | ((bits >> 4 * part & 15) << 4).astype(np.uint8)


def quantised_pair(
    folder: Path, variant: str, kind: Type, kinds: Mapping[str, Type] | None = None, **overrides: Any
) -> tuple[PreTrainedModel, GgufFile, PreTrainedModel]:
    """A tiny model packed from a `.gguf` file of `kind`, the file, and the same model dequantised by `gguf`."""
    dense = tiny_model(variant, seed=7, **{**SIZES, **HYBRID_SIZES.get(variant, {}), **overrides})
    path = folder / f"{variant}-{kind.name}.gguf"
    save_gguf(path, dense, kind, kinds=kinds)
    packed, file = packed_model(GgufIndex.read(path), dense.config)
    return packed, file, dense


@torch.no_grad()
def save_gguf(
    path: Path,
    model: PreTrainedModel,
    kind: Type,
    metadata: Mapping[str, Any] | None = None,
    omit: Container[str] = (),
    extra: Mapping[str, NDArray[Any]] | None = None,
    tensors_per_part: int = 0,
    kinds: Mapping[str, Type] | None = None,
    architecture: str = "",
    fuse_qkv: bool = False,
) -> None:
    """Write a model as llama.cpp's converter would, and give the model the values that are written.

    `kinds` gives types of their own to some projections, by the last part of their names. Weights of types that `gguf`
    cannot quantise are random blocks. Entries of `metadata` replace the model's own; None
    leaves one out. With `tensors_per_part`, the file is split. `architecture` is the model type's unless it is given.
    """
    architecture = architecture or ARCHITECTURES.get(model.config.model_type, model.config.model_type)
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=tensors_per_part)
    for key, value in {**_metadata(model, architecture), **(metadata or {})}.items():
        add_metadata(writer, key, value)
    tensors = {
        name: tensor for name, tensor in _tensors(model, architecture, kind, kinds or {}).items() if name not in omit
    }
    for name in [name for name in tensors if fuse_qkv and ".attn_q." in name]:
        thirds = [tensors.pop(name.replace("_q.", f"_{third}.")) for third in "qkv"]
        tensors[name.replace("_q.", "_qkv.")] = np.concatenate([blocks for blocks, _ in thirds]), thirds[0][1]
    for name, (blocks, of) in tensors.items():
        writer.add_tensor(name, blocks, raw_dtype=of)
    for name, numbers in {**rope_factors(model), **(extra or {})}.items():
        if name not in omit:
            writer.add_tensor(name, np.asarray(numbers, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def written(folder: Path, model: PreTrainedModel, kind: Type, *args: Any, **options: Any) -> GgufIndex:
    """Write a model to a file in a folder, as `save_gguf` does; returns what the file holds."""
    save_gguf(folder / "model.gguf", model, kind, *args, **options)
    return GgufIndex.read(folder / "model.gguf")


def add_metadata(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Add a value of any type; None is left out, and bytes are a text that need not be UTF-8."""
    if value is None:
        return
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str | bytes):
        writer.add_key_value(key, value, gguf.GGUFValueType.STRING)
    else:
        writer.add_array(key, value)


def _tensors(
    model: PreTrainedModel, architecture: str, kind: Type, kinds: Mapping[str, Type]
) -> dict[str, tuple[NDArray[Any], Type]]:
    names = gguf.get_tensor_name_map(
        next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture),
        model.config.num_hidden_layers + 1,
    )
    found, layers = dict[str, tuple[NDArray[Any], Type]](), model.config.num_hidden_layers
    ends = {".layer_scalar": ".weight", ".expert_bias": ".bias"}
    buffers = [
        (name + to, each) for name, each in model.named_buffers() for end, to in ends.items() if name.endswith(end)
    ]
    for number, (name, parameter) in enumerate([*model.named_parameters(), *buffers]):
        name = name.replace("mtp.layers.0.", f"model.layers.{layers}.")
        for own, usual in RENAMED.items():
            name = name.replace(own, usual)
        module, _, part = name.rpartition(".")
        if module.endswith(".act_fn"):  # in the metadata
            continue
        values = parameter.detach()
        if part in ("gate_up_proj_bias", "down_proj_bias"):
            block = f"blk.{name.split('.')[2]}.ffn"
            biases = {"gate": values[:, ::2], "up": values[:, 1::2]} if part[0] == "g" else {"down": values}
            found |= {f"{block}_{which}_exps.bias": (each.numpy(), Type.F32) for which, each in biases.items()}
            continue
        if part in ("gate_up_proj", "down_proj"):  # of all experts
            block, alternate = f"blk.{name.split('.')[2]}.ffn", architecture == "gpt-oss"
            values = values.transpose(1, 2) if alternate else values
            split = {"gate": values.chunk(2, 1)[0], "up": values.chunk(2, 1)[-1]}
            split = {"gate": values[:, ::2], "up": values[:, 1::2]} if alternate else split
            split = {"gate_up": values} if architecture == "gemma4" else split
            for which, weight in (split if part == "gate_up_proj" else {"down": values}).items():
                blocks = np.stack([_blocks(each, kind, number + i) for i, each in enumerate(weight)])
                found[f"{block}_{which}_exps.weight"] = blocks, kind
                weight.copy_(torch.from_numpy(np.array(dequantize(blocks, kind), np.float32)))
            continue
        shared = "mlp.shared_expert" if getattr(model.config, "num_local_experts", 0) else "mlp"
        module = module.replace("shared_mlp.output_linear", f"{shared}.down_proj")
        if module.endswith("shared_mlp.input_linear"):
            stem = names.get_name(module.replace("shared_mlp.input_linear", f"{shared}.gate_proj"))
            pieces = dict(zip((f"{stem}.weight", f"{stem.replace('gate', 'up')}.weight"), values.chunk(2), strict=True))
        elif module.endswith("in_proj_qkvz"):
            block, whole = f"blk.{name.split('.')[2]}", values[ungrouped(model.config)]
            count = model.config.linear_num_value_heads * model.config.linear_value_head_dim
            pieces = {f"{block}.attn_qkv.weight": whole[:-count], f"{block}.attn_gate.weight": whole[-count:]}
        elif part == "sinks":
            pieces = {f"{names.get_name(name)}.weight": values}
        elif module in PREDICTING:
            pieces = {f"blk.{layers}.nextn.{PREDICTING[module]}.{part}": values}
        elif part in ("A_log", "D"):
            pieces = {names.get_name(name): values}
        elif part == "dt_bias":
            pieces = {f"{names.get_name(f'{module}.dt_proj')}.bias": values}
        else:
            pieces = {names.get_name(name) or f"{names.get_name(module)}.{part}": values}
        for stored, piece in pieces.items():
            if "norm" not in name and parameter.ndim == 2 and not module.endswith(ROUTERS):
                own = kinds.get(module.rpartition(".")[2], kinds.get(stored, kind))
                blocks = _blocks(ordered(model, architecture, name, piece, undo=False), own, number)
                found[stored] = blocks, own
                kept = torch.from_numpy(np.array(dequantize(blocks, own), np.float32))
                piece.copy_(ordered(model, architecture, name, kept, undo=True))
            else:
                offset = 1.0 if architecture in OFFSET and "norm" in name and "linear_attn" not in name else 0.0
                written = ordered(model, architecture, name, piece, undo=False) + offset
                if part == "A_log":
                    written = -written.exp()
                found[stored] = shaped(architecture, stored, written).numpy(), Type.F32
                written = (-written).log() if part == "A_log" else written
                piece.copy_(ordered(model, architecture, name, written, undo=True) - offset)
        if module.endswith("in_proj_qkvz"):
            values[ungrouped(model.config)] = whole
    return found


def _blocks(values: torch.Tensor, kind: Type, seed: int) -> NDArray[Any]:
    try:
        return np.asarray(quantize(values.numpy(), kind))
    except NotImplementedError:
        return random_blocks(kind, *values.shape, seed=seed)


def _metadata(model: PreTrainedModel, architecture: str) -> dict[str, Any]:
    config = copy.copy(model.config)
    config.allow_global_per_layer_attribute_access = True  # the sizes of Gemma-4's layers differ
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    keys: dict[str, Any] = {
        "block_count": config.num_hidden_layers + hasattr(model, "mtp"),
        "nextn_predict_layers": 1 if hasattr(model, "mtp") else None,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": None if architecture == "qwen35moe" else config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": getattr(config, "norm_eps", None) or config.rms_norm_eps,
        "attention.key_length": width,
        "attention.value_length": width,
        "attention.sliding_window": None if architecture == "llama" else getattr(config, "sliding_window", None),
        "attn_logit_softcapping": None if architecture == "gemma3" else getattr(config, "attn_logit_softcapping", None),
        "final_logit_softcapping": getattr(config, "final_logit_softcapping", None),
        "attention.scale": getattr(config, "attention_multiplier", None),
        "embedding_scale": None if architecture == "falcon-h1" else getattr(config, "embedding_multiplier", None),
        "residual_scale": getattr(config, "residual_multiplier", None),
        "logit_scale": getattr(config, "logits_scaling", None),
        "expert_count": getattr(config, "num_local_experts", getattr(config, "num_experts", None)),
        "expert_used_count": getattr(config, "num_experts_per_tok", getattr(config, "top_k_experts", None)),
        "expert_feed_forward_length": getattr(
            config, "moe_intermediate_size", config.intermediate_size if architecture == "gpt-oss" else None
        ),
        "expert_shared_feed_forward_length": getattr(
            config, "shared_expert_intermediate_size", getattr(config, "shared_intermediate_size", None)
        ),
        **rope(config, width),
        **mixers(config, architecture),
    }
    if architecture == "gemma2":  # 0 says that there is no cap; without the keys there are Gemma-2's own
        caps = ("attn_logit_softcapping", "final_logit_softcapping")
        keys |= {name: getattr(config, name) or 0.0 for name in caps}
    if config.model_type in ("gemma3_text", "olmo3", "exaone4"):
        keys["attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in config.layer_types]
    if architecture == "gemma4":
        keys |= gemma4(config)
    activations = [layer.mlp.act_fn for layer in model.model.layers] if architecture == "apertus" else []
    tokens = [*(f"<{number}>" for number in range(config.vocab_size - 1)), MERGED]
    return {
        **{f"{architecture}.{key}": value for key, value in keys.items()},
        **{f"xielu.{key}": [getattr(each, key).item() for each in activations] or None for key in XIELU},
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * len(tokens),
        "tokenizer.ggml.merges": ["<0> <1>"],
        "tokenizer.ggml.eos_token_id": 2,
    }
