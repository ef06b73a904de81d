"""Gives a model the layer for multi-token prediction that its checkpoint has, and that transformers leaves out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel

from ssd_profiles.printable import printable
from ssd_runtime.loading.checkpoints.checkpoint import read_files, read_tensors
from ssd_runtime.model.layer.mtp import MtpModule

PREFIX = "mtp."
EXPERTS = ".experts."
PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""The weights of each expert that transformers joins, in files that have them apart."""


def add_mtp(spec: str, folder: Path, model: PreTrainedModel) -> tuple[str, ...]:
    """Set `model.mtp` to the layer of the checkpoint in `folder`, if that has one; returns notes for the user.

    If tensors are missing, unknown or of another shape, a note names one: the model then decodes without the layer.
    """
    found = {name: each.shape for name, each in read_tensors(spec, folder).items() if name.startswith(PREFIX)}
    module = MtpModule.empty(model) if found else None
    if module is None:
        return ()
    stored = {name: _stored(name, tuple(each.shape), found) for name, each in module.named_parameters()}
    expected = {name: shape for each in stored.values() for name, shape in each.items()}
    wrong = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    if wrong:
        name = wrong[0]
        told = "unknown" if name not in expected else "missing" if name not in found else "of another shape"
        return (f"the layer for multi-token prediction is not used, since its tensor {printable(name)} is {told}",)
    tensors = dict[str, Tensor]()
    for file in read_files(spec, folder):
        with safe_open(file, "pt") as opened:
            own = [name for name in opened.keys() if name.startswith(PREFIX)]  # noqa: SIM118 - it is no mapping
            tensors |= {name: opened.get_tensor(name).to(model.dtype) for name in own}
    values = dict[str, Tensor]()
    for name, parameter in module.named_parameters():
        parts = [tensors.pop(each) for each in stored[name]]
        values[name] = parts[0] if len(parts) == 1 else torch.cat(parts).view(parameter.shape)
    module.load_state_dict(values, assign=True)
    model.mtp = module.to(model.device).requires_grad_(False).eval()
    return ()


def _stored(name: str, shape: tuple[int, ...], found: Mapping[str, object]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the file's tensors that are a parameter of the module, one after the other."""
    block, apart, kind = f"{PREFIX}{name}".partition(EXPERTS)
    if not apart or f"{PREFIX}{name}" in found:
        return {f"{PREFIX}{name}": shape}
    experts, rows, columns = shape
    parts = PARTS[kind]
    return {
        f"{block}{EXPERTS}{number}.{part}.weight": (rows // len(parts), columns)
        for number in range(experts)
        for part in parts
    }
