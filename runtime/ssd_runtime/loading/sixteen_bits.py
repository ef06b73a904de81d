"""Keeps the weights of a checkpoint in their own 16 bits on a CPU, while rows are fp32."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np
import torch
from accelerate import init_empty_weights
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from ssd_artifacts.safetensors_header import StoredTensor
from ssd_profiles.errors import UserError
from ssd_runtime.devices.memory import return_freed
from ssd_runtime.loading.packing import EMBEDDINGS, buffers, pack, replace, replace_embedding
from ssd_runtime.model.family.families import family_of
from ssd_runtime.weights.kernels.native import Native
from ssd_runtime.weights.native.library import library
from ssd_runtime.weights.packed_linear import PackedLinear

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16}
PROBED = 64
"""Outputs of each projection that are compared with the product of its weight."""
TOLERANCE = 1e-4
"""Largest relative difference of these products, in root mean squares: that of two orders of their sums."""


def dtype_to_keep(tensors: Mapping[str, StoredTensor], config: PreTrainedConfig) -> torch.dtype | None:
    """The one dtype of 16 bits of all of a checkpoint's tensors; None where they differ or would not be kept.

    Experts, which checkpoints hold joined, are not kept yet.
    """
    found = {tensor.dtype for tensor in tensors.values()}
    dense = getattr(config, "quantization_config", None) is None and family_of(config).router is None
    return DTYPES.get(found.pop()) if library() is not None and dense and len(found) == 1 else None


def keep_numbers(stored: PreTrainedModel) -> PreTrainedModel:
    """The model `stored`, of 16 bits, as one of fp32 whose projections and embeddings have its numbers as they are.

    Takes the memory of `stored` as it goes. Raises UserError if a kernel's product is not that of its weight.
    """
    config = stored.config
    config.dtype = torch.float32
    with init_empty_weights(include_buffers=False):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    own = stored.state_dict()
    for name in EMBEDDINGS:
        if (weight := own.get(f"{name}.weight")) is not None:
            data = weight.view(torch.uint8).numpy()
            replace_embedding(model, name, data, partial(_as_floats, dtype=weight.dtype))
    pack(model, family_of(config), partial(_keep, model, stored))
    for name, parameter in list(model.named_parameters()):
        if parameter.is_meta:
            replace(model, name, nn.Parameter(own[name].float(), requires_grad=False))
    for name, buffer in buffers(model):
        buffer.copy_(own[name])
    model.generation_config = stored.generation_config
    return_freed()
    return model.eval()


def _keep(model: PreTrainedModel, stored: PreTrainedModel, names: list[str]) -> None:
    """Replace projections that share an input; those that our kernels do not serve stay `nn.Linear`."""
    found = [stored.get_submodule(name) for name in names]
    linears = [each for each in found if isinstance(each, nn.Linear)]
    columns = {linear.in_features for linear in linears}
    if len(linears) < len(found) or len(columns) > 1:
        return
    if not Native.can_serve(sum(linear.out_features for linear in linears), *columns):
        return
    weight = torch.cat([linear.weight.detach() for linear in linears])
    bias = _bias(linears)
    kernel = Native.of16(weight, bias)
    _check(kernel, weight, bias, names)
    begin = 0
    for name, linear in zip(names, linears, strict=True):
        replace(model, name, PackedLinear(kernel, begin, begin + linear.out_features))
        begin += linear.out_features
        linear.weight = nn.Parameter(linear.weight.new_empty(0), requires_grad=False)


def _check(kernel: Native, weight: Tensor, bias: Tensor | None, names: list[str]) -> None:
    """Raise UserError unless the kernel computes what the weight does."""
    rows = weight[:PROBED].float()
    probe = torch.linspace(-1, 1, weight.shape[1])[None]
    expected = probe @ rows.T if bias is None else probe @ rows.T + bias[:PROBED]
    if not (kernel(probe)[:, :PROBED] - expected).norm() <= TOLERANCE * expected.norm():
        raise UserError(
            f"model: the {kernel.name} kernel computes {names[0]} wrongly on this processor; use --dtype fp32"
        )


def _bias(linears: list[nn.Linear]) -> Tensor | None:
    if all(linear.bias is None for linear in linears):
        return None
    zeros = torch.zeros
    return torch.cat([zeros(x.out_features) if x.bias is None else x.bias.detach().float() for x in linears])


def _as_floats(data: NDArray[np.uint8], dtype: torch.dtype) -> NDArray[np.float32]:
    floats: NDArray[np.float32] = torch.from_numpy(data).view(dtype).float().numpy()
    return floats
