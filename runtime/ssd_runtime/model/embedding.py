"""From token ids to the states before the first sub-layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ssd_runtime.devices.clock import WaitedLock
from ssd_runtime.devices.placement import device_of
from ssd_runtime.devices.transfer import to_device
from ssd_runtime.model.family.family import Family
from ssd_runtime.model.family.layer_kinds import setting
from ssd_runtime.model.layer.layer_inputs import LayerInputs
from ssd_runtime.weights.linear import stamp_of


class Embedding:
    """The model's embeddings, scaled as the family does, on their own device."""

    def __init__(self, model: PreTrainedModel, family: Family, inputs: LayerInputs | None, lock: WaitedLock) -> None:
        """With `inputs`, all states carry their tokens."""
        self._base = model.model
        self._scale = _scale(model, family)
        self._inputs = inputs
        self._lock = lock
        self._stamp = stamp_of([self._base.embed_tokens])
        self.device = device_of(self._base.embed_tokens)

    def __call__(self, *ids: Sequence[int] | Tensor) -> Tensor:
        """States [n, hidden] of token ids, some on the host and some on the device, one after the other."""
        parts = [each if isinstance(each, Tensor) else to_device(each, self.device) for each in ids]
        tokens = parts[0] if len(parts) == 1 else torch.cat(parts)
        with self._lock:
            x = self._base.embed_tokens(tokens)
        x = x if self._scale is None else x * self._scale
        return x if self._inputs is None else self._inputs.carried(x, tokens)

    def refresh(self) -> bool:
        """Follow changes of the user's modules; returns whether there were any."""
        before, self._stamp = self._stamp, stamp_of([self._base.embed_tokens])
        return self._stamp != before


def _scale(model: PreTrainedModel, family: Family) -> float | Tensor | None:
    """The base model's factor of embeddings, unless its embedding module applies it; None for 1."""
    module = model.model.embed_tokens
    # The first 5.x versions of transformers scale Gemma-2's embeddings in the model, later ones in the module.
    if family.scaled_embedding and getattr(module, "embed_scale", None) is None:
        return torch.tensor(model.config.hidden_size**0.5, dtype=model.dtype, device=device_of(module))
    return setting(model.config, family.embedding_multiplier)
