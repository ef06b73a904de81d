"""Builds transformers models with the weights of a `.gguf` file, dequantised or packed."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from accelerate import init_empty_weights
from gguf.quants import dequantize
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from ssd_runtime.devices.memory import return_freed
from ssd_runtime.loading.gguf.architectures import architecture_of, predicting_tensors
from ssd_runtime.loading.gguf.rope import TENSORS
from ssd_runtime.model.family.families import family_of
from ssd_runtime.model.family.family import Family
from ssd_runtime.model.family.layer_kinds import LayerKind, layer_kinds
from ssd_runtime.model.layer.layer import present
from ssd_runtime.model.layer.layer_inputs import INJECTION
from ssd_runtime.model.layer.mtp import MtpModule
from ssd_runtime.weights.gguf.file import GgufFile
from ssd_runtime.weights.gguf.index import GgufIndex
from ssd_runtime.weights.native.library import library
from ssd_runtime.weights.packed_linear import PackedEmbedding, PackedExperts, PackedLinear

EMBEDDINGS = ("model.embed_tokens", "model.embed_tokens_per_layer")
MODEL_PROJECTION = "model.per_layer_model_projection"
"""The projection of all layers' inputs (`LayerInputs`)."""
EXPERT: tuple[tuple[str, ...], ...] = (("gate_proj", "up_proj"), ("down_proj",))
"""Projections of each of `PackedExperts`; those side by side share an input."""


def dense_model(index: GgufIndex, config: PreTrainedConfig) -> PreTrainedModel:
    """Build the model of `config` with the weights of a `.gguf` file in fp32.

    Raises UserError unless the file has each of the model's tensors in its shape, and no others.
    """
    model, file = _empty(index, config)
    _fill(model, file)
    model.tie_weights()
    return model


def packed_model(index: GgufIndex, config: PreTrainedConfig) -> tuple[PreTrainedModel, GgufFile]:
    """Build the model of `config` with the weights of a `.gguf` file; returns the model and the file.

    Projections are `PackedLinear`, or `nn.Linear` where the file has them dense. Embeddings are read from the file, row
    by row. All else is fp32. Raises UserError as `dense_model` does.
    """
    family = family_of(config)
    model, file = _empty(index, config)
    found = library()

    def place(projections: Sequence[list[str]]) -> None:
        # A thread per layer: threads of torch's that share one of its small operations wait for each other, beside busy
        # processes ten times as long.
        with torch.inference_mode(), nullcontext() if found is None else found.torch_alone():
            for names in projections:
                _place(model, file, names)

    kinds = layer_kinds(config, family)
    layers = [_projections(model, family, f"model.layers.{number}", kind) for number, kind in enumerate(kinds)]
    if hasattr(model, "mtp"):
        full = next(kind for kind in kinds if kind.is_full)
        layers.append([["mtp.fc"], *_projections(model, family, "mtp.layers.0", full)])
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        others = [["lm_head"], *([[MODEL_PROJECTION]] if file.has(f"{MODEL_PROJECTION}.weight") else [])]
        for placed in [pool.submit(place, each) for each in (others, *layers)]:
            placed.result()
    _place_embeddings(model, file)
    _fill(model, file)
    return model, file


def _empty(index: GgufIndex, config: PreTrainedConfig) -> tuple[PreTrainedModel, GgufFile]:
    """The model without memory for its weights, and the file, which has all of them."""
    family_of(config)
    with init_empty_weights(include_buffers=False):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    file = GgufFile(index, architecture_of(index).layout, config)
    _add_mtp(model, file, predicting_tensors(index))
    shapes = {name: parameter.shape for name, parameter in (*model.named_parameters(), *_buffers(model))}
    file.require(shapes, [*TENSORS, *predicting_tensors(index)])
    return model.eval(), file


def _add_mtp(model: PreTrainedModel, file: GgufFile, predicting: Sequence[str]) -> None:
    """Give the model a layer for multi-token prediction without memory, if that is just what the file has."""
    module = MtpModule.empty(model) if predicting else None
    if module is not None and file.names([f"mtp.{name}" for name, _ in module.named_parameters()]) == set(predicting):
        model.mtp = module


def _fill(model: PreTrainedModel, file: GgufFile) -> None:
    """Give memory and the file's values to all parameters that have none."""
    for name, parameter in list(model.named_parameters()):
        if parameter.is_meta:
            _set(model, name, nn.Parameter(file.dense(name, parameter.shape), requires_grad=False))
    for name, buffer in _buffers(model):
        buffer.copy_(file.dense(name, buffer.shape))
    file.forget()
    return_freed()


def _projections(model: nn.Module, family: Family, layer: str, kind: LayerKind) -> list[list[str]]:
    """The names of a layer's projections; those side by side share an input. Experts are made single ones first."""
    mixer = kind.mixer
    mixing, shared, output = (
        ("self_attn", family.qkv, family.output) if mixer is None else (mixer.module, mixer.projections, mixer.output)
    )
    shared = present(model.get_submodule(f"{layer}.{mixing}"), shared)
    found = [[f"{layer}.{mixing}.{name}" for name in names] for names in (shared, (output,))]
    if (beside := family.parallel) is not None:
        found += [
            [f"{layer}.{beside.module}.{name}" for name in names] for names in (beside.projections, (beside.output,))
        ]
    found += [[f"{layer}.{name}"] for name in INJECTION] if hasattr(model.get_submodule(layer), INJECTION[0]) else []
    block = layer if family.beside else f"{layer}.{family.mlp}"
    is_mixture = family.router is not None and hasattr(model.get_submodule(block), family.router)
    blocks = dict.fromkeys(_place_experts(model, block) if is_mixture else (), EXPERT)
    alone = family.shared if is_mixture and not family.beside else family.mlp
    blocks |= {f"{layer}.{alone}": (family.gate_up, (family.down,))} if alone else {}
    return found + [[f"{block}.{name}" for name in names] for block, lists in blocks.items() for names in lists]


def _place(model: nn.Module, file: GgufFile, names: list[str]) -> None:
    """Replace projections that share an input by packed ones; dense ones stay `nn.Linear`."""
    for run, kernel in file.kernels(names):
        begin = 0
        for name in run:
            linear = model.get_submodule(name)
            if kernel is not None and isinstance(linear, nn.Linear):
                columns = file.columns(name, linear.in_features)
                _set(model, name, PackedLinear(kernel, begin, begin + linear.out_features, columns))
                begin += linear.out_features


def _place_experts(model: nn.Module, block: str) -> list[str]:
    """Replace the experts of a block by single ones without memory, whose names are returned."""
    joined: Any = model.get_submodule(f"{block}.experts")
    count, hidden, inner = joined.down_proj.shape
    sizes = {"gate_proj": (hidden, inner), "up_proj": (hidden, inner), "down_proj": (inner, hidden)}
    experts = [
        nn.ModuleDict({name: nn.Linear(*size, bias=False, device="meta") for name, size in sizes.items()})
        for _ in range(count)
    ]
    _set(model, f"{block}.experts", PackedExperts(experts, joined.act_fn))
    return [f"{block}.experts.{number}" for number in range(count)]


def _place_embeddings(model: PreTrainedModel, file: GgufFile) -> None:
    for name in EMBEDDINGS:
        if file.has(f"{name}.weight"):
            data, kind = file.stored(f"{name}.weight")
            scale = getattr(model.get_submodule(name), "embed_scale", None)
            dequantise = partial(dequantize, qtype=kind)
            _set(model, name, PackedEmbedding(data, dequantise, None if scale is None else float(scale)))


def _buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    """The buffers that checkpoints hold, which files hold as they do parameters."""
    kept = model.state_dict().keys()
    return [(name, buffer) for name, buffer in model.named_buffers() if name in kept]


def _set(model: nn.Module, name: str, value: nn.Module | nn.Parameter) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, value)
