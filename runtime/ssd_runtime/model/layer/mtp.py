"""The layer with which a model predicts the token after the next one (multi-token prediction), as its own drafter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ssd_runtime.model.family.families import family_of
from ssd_runtime.model.family.family import Family
from ssd_runtime.model.family.layer_kinds import layer_kinds
from ssd_runtime.model.layer.layer import Layer
from ssd_runtime.model.layer.norm import Norm
from ssd_runtime.weights.linear import Linear, PackedMemory


class MtpModule(nn.Module):
    """The weights `mtp.*` of a checkpoint, by its names, as `model.mtp`. The engine calls its parts, never itself."""

    def __init__(self, model: PreTrainedModel, family: Family) -> None:
        """Modules as the model has them: a decoder layer with full attention, and norms of its hidden size."""
        super().__init__()
        config: Any = model.config
        place = next(place for place, kind in enumerate(layer_kinds(config, family)) if kind.is_full)
        final: Any = getattr(model.model, family.final_norm)
        hidden, norm = config.hidden_size, type(final)
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = (norm(hidden, final.eps) for _ in range(3))
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.layers = nn.ModuleList([type(model.model.layers[place])(config, place)])

    @classmethod
    def empty(cls, model: PreTrainedModel) -> MtpModule | None:
        """The module without memory for its weights; None if no checkpoint of the model's family has such a layer."""
        family = family_of(model.config)
        if not family.predicts_ahead or not any(kind.is_full for kind in layer_kinds(model.config, family)):
            return None
        with torch.device("meta"):
            return cls(model, family)


class Mtp:
    """The parts of an `MtpModule` beside its decoder layer, which is the sub-layers' last one.

    The layer's row of a token takes the token's embedding and the model's final state of the token before it, both
    normed. Its output predicts the next token, and stands for the final state in the row after it.
    """

    def __init__(self, module: MtpModule, layer: Layer, family: Family, memory: PackedMemory) -> None:
        self.layer = layer
        self._embedding_norm = Norm(module, "pre_fc_norm_embedding", family.norm_offset)
        self._state_norm = Norm(module, "pre_fc_norm_hidden", family.norm_offset)
        self._joint = Linear(module, ("fc",), memory)
        self.norm = Norm(module, "norm", family.norm_offset)

    def normed(self, embedded: Tensor, states: Tensor) -> Tensor:
        """Normed embeddings [n, hidden] and final states [n, hidden] side by side, for `joined`."""
        return torch.cat([self._embedding_norm(embedded), self._state_norm(states)], -1)

    def joined(self, normed: Tensor) -> Tensor:
        """The layer's input [n, hidden] of rows of `normed` [n, 2 hidden]."""
        return self._joint(normed)

    @property
    def is_native(self) -> bool:
        """Whether our own code computes the layer's input."""
        return bool(self._joint.natives)

    def linears(self) -> tuple[Linear, ...]:
        """All projections but light copies."""
        return self._joint, *self.layer.linears()

    def refresh(self) -> bool:
        """Follow changes of the user's modules; returns whether there were any."""
        parts = (self.layer, self._embedding_norm, self._state_norm, self._joint, self.norm)
        changed = [part.refresh() for part in parts]
        return any(changed)
