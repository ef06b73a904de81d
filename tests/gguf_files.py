"""Small `.gguf` files of tiny models, quantised by the `gguf` library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import torch
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize, quantize
from transformers import PreTrainedModel

from ssd_runtime.loading.packed import packed_model
from ssd_runtime.weights.gguf_file import GgufFile
from ssd_runtime.weights.gguf_index import GgufIndex
from tests.models import tiny_model

SIZES: dict[str, Any] = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
"""Sizes whose weights the kernels take: groups of 32 columns, and 16 outputs at a time."""
HEADS = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}


def quantised_pair(
    folder: Path, variant: str, kind: Type, **overrides: Any
) -> tuple[PreTrainedModel, GgufFile, PreTrainedModel]:
    """A tiny model packed from a `.gguf` file of `kind`, the file, and the same model dequantised by `gguf`."""
    dense = tiny_model(variant, seed=7, **{**SIZES, **overrides})
    path = folder / f"{variant}-{kind.name}.gguf"
    save_gguf(path, dense, kind)
    packed, file = packed_model(path, GgufIndex.read(path), dense.config)
    return packed, file, dense


@torch.no_grad()
def save_gguf(path: Path, model: PreTrainedModel, kind: Type) -> None:
    """Write a model's weights as llama.cpp's converter would, and give the model the values that are written."""
    architecture = model.config.model_type
    names = gguf.get_tensor_name_map(
        next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture), model.config.num_hidden_layers
    )
    writer = gguf.GGUFWriter(path, architecture)
    for name, parameter in model.named_parameters():
        module, _, part = name.rpartition(".")
        values = parameter.detach()
        if "norm" not in name and parameter.ndim == 2:
            blocks = quantize(_ordered(model, module, values, undo=False).numpy(), kind)
            writer.add_tensor(f"{names.get_name(module)}.{part}", blocks, raw_dtype=kind)
            kept = torch.from_numpy(dequantize(blocks, kind))
            parameter.copy_(_ordered(model, module, kept, undo=True))
        else:
            writer.add_tensor(f"{names.get_name(module)}.{part}", _ordered(model, module, values, undo=False).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _ordered(model: PreTrainedModel, module: str, rows: torch.Tensor, undo: bool) -> torch.Tensor:
    """Rows of Llama's queries and keys in the order of its files, where the halves of a head alternate."""
    last = module.rpartition(".")[2]
    if model.config.model_type != "llama" or last not in HEADS:
        return rows
    heads = getattr(model.config, HEADS[last])
    parts = rows.unflatten(0, (heads, -1, 2) if undo else (heads, 2, -1))
    return parts.transpose(1, 2).reshape(rows.shape).contiguous()
