"""Builds a transformers model whose projections keep the quantised weights of a `.gguf` file."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from accelerate import init_empty_weights
from gguf.quants import dequantize
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from ssd_profiles.errors import UserError
from ssd_runtime.model.families import family_of
from ssd_runtime.profiling.memory import return_freed
from ssd_runtime.weights.gguf_file import GgufFile
from ssd_runtime.weights.gguf_index import GgufIndex
from ssd_runtime.weights.packed_linear import PackedEmbedding, PackedLinear

EMBEDDING = "model.embed_tokens"


def packed_model(path: Path, index: GgufIndex, config: PreTrainedConfig) -> tuple[PreTrainedModel, GgufFile]:
    """Build the model of `config` with the weights of a `.gguf` file; returns both.

    Projections are `PackedLinear`, or `nn.Linear` where the file has them dense. Embeddings are read from the file, row
    by row. All else is fp32. Raises UserError when the file lacks tensors or is of an unknown architecture.
    """
    family = family_of(config)
    file = GgufFile(path, index, config)
    with init_empty_weights(include_buffers=False):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.inference_mode():
        for number in range(config.num_hidden_layers):
            layer = f"model.layers.{number}"
            for shared in (family.qkv, ("o_proj",)):
                _place(model, file, [f"{layer}.self_attn.{name}" for name in shared])
            for shared in (family.gate_up, ("down_proj",)):
                _place(model, file, [f"{layer}.mlp.{name}" for name in shared])
        _place(model, file, ["lm_head"])
        _place_embedding(model, file)
    for name, parameter in list(model.named_parameters()):
        if parameter.is_meta:
            _set(model, name, nn.Parameter(_of_shape(file, name, parameter.shape), requires_grad=False))
    file.forget()
    return_freed()
    return model.eval(), file


def _place(model: nn.Module, file: GgufFile, names: list[str]) -> None:
    """Replace projections that share an input by packed ones; dense ones stay `nn.Linear`."""
    for run, kernel in file.kernels(names):
        begin = 0
        for name in run:
            linear = model.get_submodule(name)
            if kernel is not None and isinstance(linear, nn.Linear):
                _set(model, name, PackedLinear(kernel, begin, begin + linear.out_features))
                begin += linear.out_features


def _place_embedding(model: PreTrainedModel, file: GgufFile) -> None:
    data, kind = file.stored(f"{EMBEDDING}.weight")
    module = model.get_submodule(EMBEDDING)
    if len(data) != model.config.vocab_size:
        raise UserError(
            f"{file.path}: its embedding and tokenizer differ in size; convert it again, or use --weights dense"
        )
    factor = float(getattr(module, "embed_scale", 1.0))
    _set(model, EMBEDDING, PackedEmbedding(data, partial(dequantize, qtype=kind), factor))


def _of_shape(file: GgufFile, name: str, shape: torch.Size) -> Tensor:
    tensor = file.dense(name)
    if tensor.shape != shape:
        raise UserError(
            f"{file.path}: {name} is {tuple(tensor.shape)}, expected {tuple(shape)}; download it again, or use "
            "--weights dense"
        )
    return tensor


def _set(model: nn.Module, name: str, value: nn.Module | nn.Parameter) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, value)
