"""Keeps the weights of a checkpoint in their own 16 bits on a CPU, while rows are fp32."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ssd_artifacts.safetensors_header import StoredTensor
from ssd_profiles.errors import UserError
from ssd_runtime.devices.memory import return_freed
from ssd_runtime.loading.checkpoints.pretrained import unfilled_model
from ssd_runtime.loading.packing import EMBEDDINGS, fill, pack, replace_embedding, share_kernel
from ssd_runtime.model.family.families import family_of
from ssd_runtime.model.layer.experts import are_transposed
from ssd_runtime.weights.kernels.kernel import computes
from ssd_runtime.weights.kernels.native import Native
from ssd_runtime.weights.linear import side_by_side
from ssd_runtime.weights.native.library import library
from ssd_runtime.weights.packed_linear import PackedLinear

EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)")
"""Names of the projections of an expert, once experts are single ones. Checkpoints join those of all experts: as
[experts, out, in], or as [experts, in, out] with the outputs of gate and up by turns."""
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16}
PROBED = 64
"""Outputs of each projection that are compared with the product of its weight."""
TOLERANCE = 1e-4
"""Largest relative difference of these products, in root mean squares: that of two orders of their sums."""


def dtype_to_keep(tensors: Mapping[str, StoredTensor], config: PreTrainedConfig) -> torch.dtype | None:
    """The one dtype of 16 bits of all of a checkpoint's tensors; None where they differ or would not be kept."""
    found = {tensor.dtype for tensor in tensors.values()}
    if library() is None or getattr(config, "quantization_config", None) is not None:
        return None
    return DTYPES.get(found.pop()) if len(found) == 1 else None


def keep_numbers(stored: PreTrainedModel) -> PreTrainedModel:
    """The model `stored`, of 16 bits, as one of fp32 whose projections and embeddings have its numbers as they are.

    Nothing is left of `stored`. Raises UserError if a kernel's product is not that of its weight.
    """
    config, own = stored.config, stored.state_dict()
    stored.to("meta")
    config.dtype = torch.float32
    model = unfilled_model(config)
    for name in EMBEDDINGS:
        if (weight := own.get(f"{name}.weight")) is not None:
            data = weight.view(torch.uint8).numpy()
            replace_embedding(model, name, data, partial(_as_floats, dtype=weight.dtype))
    pack(model, family_of(config), partial(_keep, model, own))
    fill(model, lambda name, _: _stored(own, name).float())
    model.generation_config = stored.generation_config
    return_freed()
    return model.eval()


def _keep(model: PreTrainedModel, own: dict[str, Tensor], names: list[str]) -> None:
    """Replace projections that share an input, with weights that it takes from `own`, if our kernels can serve them."""
    weights = [_stored(own, f"{name}.weight") for name in names]
    columns = {weight.shape[1] for weight in weights}
    if len(columns) > 1 or not Native.can_serve(*columns):
        return
    biased = [cast(nn.Linear, model.get_submodule(name)).bias is not None for name in names]
    biases = [_stored(own, f"{name}.bias") if has else None for name, has in zip(names, biased, strict=True)]
    weight, bias = side_by_side(weights, biases)
    kernel = Native.of16(weight, bias)
    if not computes(kernel, weight[:PROBED].float(), None if bias is None else bias[:PROBED].float(), 0, TOLERANCE):
        raise UserError(
            f"model: the {kernel.name} kernel computes {names[0]} wrongly on this processor; use --dtype fp32"
        )
    share_kernel(model, names, kernel)
    for name in names:
        own.pop(f"{name}.weight", None)
    if expert := EXPERT.fullmatch(names[-1]):
        block, number, which = expert.groups()
        served = isinstance(model.get_submodule(f"{block}.{number}.gate_proj"), PackedLinear)
        # After the last one of a block, nobody needs the tensors that hold the weights of all.
        if served and which == "down_proj" and int(number) + 1 == len(own[f"{block}.down_proj"]):
            del own[f"{block}.gate_up_proj"], own[f"{block}.down_proj"]


def _stored(own: Mapping[str, Tensor], name: str) -> Tensor:
    """A parameter as checkpoints hold it, or that of one of the experts that they join."""
    module, _, kind = name.rpartition(".")
    if (expert := EXPERT.fullmatch(module)) is None:
        return own[name]
    block, number, which = expert.groups()
    end = "_bias" if kind == "bias" else ""
    joined, down = (own[f"{block}.{part}{end}"][int(number)] for part in ("gate_up_proj", "down_proj"))
    alternate = are_transposed(own[f"{block}.gate_up_proj"], own[f"{block}.down_proj"])
    joined, down = (joined.T, down.T) if alternate and not end else (joined, down)
    if which == "down_proj":
        return down.contiguous()
    gate, up = (joined[::2], joined[1::2]) if alternate else joined.chunk(2)
    return (gate if which == "gate_proj" else up).contiguous()


def _as_floats(data: NDArray[np.uint8], dtype: torch.dtype) -> NDArray[np.float32]:
    floats: NDArray[np.float32] = torch.from_numpy(data).view(dtype).float().numpy()
    return floats
