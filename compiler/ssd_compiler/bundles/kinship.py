"""Compares a model with the one that a bundle was made for: sizes, and distances of tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from ssd_artifacts.bundle import Bundle
from ssd_profiles.errors import UserError
from ssd_runtime.loading.loaded_model import LoadedModel

SAMPLES = 4096
"""Most values of a tensor that are compared, spread evenly."""
FARTHEST = 0.5
"""Largest median difference of tensors, in norms of the original's, at which a model still counts as related."""


@dataclass(frozen=True, slots=True)
class Distance:
    """Relative difference ||a - b|| ÷ ||a|| of two models' tensors, by sampled values in fp32."""

    tensors: int
    median: float
    largest: float
    farthest: str
    """Name of the tensor that differs most."""


def require_same_shapes(bundle: Bundle, loaded: LoadedModel, where: str) -> None:
    """Raise UserError when the bundle's masks, anchors or tokens cannot belong to a model of these sizes."""
    config = loaded.model.config
    fingerprint = loaded.fingerprint()
    pairs = (
        ("architecture", bundle.model.architecture, fingerprint.architecture),
        ("layers", bundle.model.num_layers, fingerprint.num_layers),
        ("hidden size", bundle.anchors.center.size, config.hidden_size),
    )
    for part, expected, got in pairs:
        if expected != got:
            raise UserError(
                f"{where}: made for {part} {expected}, {fingerprint.name} has {got}; compile a bundle for this model"
            )


def distance(original: PreTrainedModel, other: PreTrainedModel, where: str) -> Distance:
    """Compare all tensors of two models. Raises UserError when names or shapes differ, or too much of the values."""
    known = dict(original.named_parameters())
    found = dict(other.named_parameters())
    if known.keys() != found.keys():
        name = sorted(known.keys() ^ found.keys())[0]
        raise UserError(f"{where}: {name} is in one of the two models alone; compile a bundle for this model")
    differences = {}
    for name, tensor in known.items():
        if tensor.shape != found[name].shape:
            raise UserError(
                f"{where}: {name} has shape {list(tensor.shape)} in the original and {list(found[name].shape)} here; "
                "compile a bundle for this model"
            )
        a, b = _sampled(tensor), _sampled(found[name])
        differences[name] = float((a - b).norm() / a.norm().clamp_min(1e-12))
    farthest = max(differences, key=lambda name: differences[name])
    median = float(torch.tensor(sorted(differences.values())).median())
    if not median <= FARTHEST:
        raise UserError(
            f"{where}: the models' tensors differ by {median:.2f} of their norm (median), at most {FARTHEST} is "
            "expected of a fine-tune or another quantisation; compile a bundle for this model"
        )
    return Distance(tensors=len(known), median=median, largest=differences[farthest], farthest=farthest)


def _sampled(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().reshape(-1)
    step = max(1, flat.numel() // SAMPLES)
    return flat[::step].float().cpu()
