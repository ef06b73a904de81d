"""Keeps the weights of a checkpoint in their own 16 bits on a CPU, while rows are fp32."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from ssd_artifacts.safetensors_header import StoredTensor
from ssd_profiles.errors import UserError
from ssd_runtime.devices.memory import return_freed
from ssd_runtime.loading.checkpoints.pretrained import unfilled_model
from ssd_runtime.loading.packing import EMBEDDINGS, fill, pack, replace_embedding, share_kernel
from ssd_runtime.model.family.families import family_of
from ssd_runtime.weights.kernels.kernel import computes
from ssd_runtime.weights.kernels.native import Native
from ssd_runtime.weights.linear import side_by_side
from ssd_runtime.weights.native.library import library

EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)")
"""Names of the projections of an expert, once experts are single ones."""
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16}
PROBED = 64
"""Outputs of each projection that are compared with the product of its weight."""
TOLERANCE = 1e-4
"""Largest relative difference of these products, in root mean squares: that of two orders of their sums."""


def dtype_to_keep(tensors: Mapping[str, StoredTensor], config: PreTrainedConfig) -> torch.dtype | None:
    """The one dtype of 16 bits of all of a checkpoint's tensors; None where they differ or would not be kept."""
    found = {tensor.dtype for tensor in tensors.values()}
    family = family_of(config)
    alternate = family.router is not None and family.sinks  # GPT-OSS's experts, whose gate and up take turns
    if library() is None or alternate or getattr(config, "quantization_config", None) is not None:
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
    fill(model, lambda name, _: (own[name] if name in own else _weight(own, name.removesuffix(".weight"))).float())
    model.generation_config = stored.generation_config
    return_freed()
    return model.eval()


def _keep(model: PreTrainedModel, own: dict[str, Tensor], names: list[str]) -> None:
    """Replace projections that share an input, with weights that it takes from `own`, if our kernels can serve them."""
    weights = [_weight(own, name) for name in names]
    columns = {weight.shape[1] for weight in weights}
    if len(columns) > 1 or not Native.can_serve(sum(map(len, weights)), *columns):
        return
    weight, bias = side_by_side(weights, [own.get(f"{name}.bias") for name in names])
    kernel = Native.of16(weight, bias)
    if not computes(kernel, weight[:PROBED].float(), None if bias is None else bias[:PROBED].float(), 0, TOLERANCE):
        raise UserError(
            f"model: the {kernel.name} kernel computes {names[0]} wrongly on this processor; use --dtype fp32"
        )
    share_kernel(model, names, kernel)
    for name in names:
        own.pop(f"{name}.weight", None)


def _weight(own: Mapping[str, Tensor], module: str) -> Tensor:
    """The weight [out, in] of a projection, which may be that of one of the experts that checkpoints join."""
    if (expert := EXPERT.fullmatch(module)) is None:
        return own[f"{module}.weight"]
    block, number, name = expert.groups()
    if name == "down_proj":
        return own[f"{block}.down_proj"][int(number)]
    gate, up = own[f"{block}.gate_up_proj"][int(number)].chunk(2)
    return gate if name == "gate_proj" else up


def _as_floats(data: NDArray[np.uint8], dtype: torch.dtype) -> NDArray[np.float32]:
    floats: NDArray[np.float32] = torch.from_numpy(data).view(dtype).float().numpy()
    return floats
