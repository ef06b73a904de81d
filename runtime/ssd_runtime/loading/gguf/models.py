"""Builds transformers models with the weights of a `.gguf` file, dequantised or packed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from gguf.quants import dequantize
from transformers import PreTrainedConfig, PreTrainedModel

from ssd_runtime.devices.memory import return_freed
from ssd_runtime.loading.checkpoints.folder import guarded_loading
from ssd_runtime.loading.checkpoints.pretrained import unfilled_model
from ssd_runtime.loading.gguf.architectures import architecture_of, predicting_tensors
from ssd_runtime.loading.gguf.rope import TENSORS
from ssd_runtime.loading.packing import EMBEDDINGS, buffers, fill, pack, replace_embedding, share_kernel
from ssd_runtime.model.family.families import family_of
from ssd_runtime.model.layer.mtp import MtpModule
from ssd_runtime.weights.gguf.file import GgufFile
from ssd_runtime.weights.gguf.index import GgufIndex


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
    pack(model, family, partial(_place, model, file))
    _place_embeddings(model, file)
    _fill(model, file)
    return model, file


def _empty(index: GgufIndex, config: PreTrainedConfig) -> tuple[PreTrainedModel, GgufFile]:
    """The model without memory for its weights, and the file, which has all of them."""
    family_of(config)
    with guarded_loading(str(index.path)):
        model = unfilled_model(config)
    file = GgufFile(index, architecture_of(index).layout, config)
    _add_mtp(model, file, predicting_tensors(index))
    shapes = {name: parameter.shape for name, parameter in (*model.named_parameters(), *buffers(model))}
    file.require(shapes, [*TENSORS, *predicting_tensors(index)])
    return model.eval(), file


def _add_mtp(model: PreTrainedModel, file: GgufFile, predicting: Sequence[str]) -> None:
    """Give the model a layer for multi-token prediction without memory, if that is just what the file has."""
    module = MtpModule.empty(model) if predicting else None
    if module is not None and file.names([f"mtp.{name}" for name, _ in module.named_parameters()]) == set(predicting):
        model.mtp = module


def _fill(model: PreTrainedModel, file: GgufFile) -> None:
    """Give memory and the file's values to all parameters that have none."""
    fill(model, file.dense)
    file.forget()
    return_freed()


def _place(model: PreTrainedModel, file: GgufFile, names: list[str]) -> None:
    """Replace projections that share an input by packed ones; dense ones stay `nn.Linear`."""
    for run, kernel in file.kernels(names):
        if kernel is not None:
            share_kernel(model, run, kernel, file.columns)


def _place_embeddings(model: PreTrainedModel, file: GgufFile) -> None:
    for name in EMBEDDINGS:
        if file.has(f"{name}.weight"):
            data, kind = file.stored(f"{name}.weight")
            replace_embedding(model, name, data, partial(dequantize, qtype=kind))
