"""The vectors that a row's token gives to each layer of Gemma-4 (per-layer embeddings)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from ssd_runtime.model.family.family import Family
from ssd_runtime.model.family.layer_kinds import setting
from ssd_runtime.model.layer.mlp import LayerActivation
from ssd_runtime.model.layer.norm import Norm
from ssd_runtime.weights.kernels.native_ending import Injected
from ssd_runtime.weights.light import LightLinear
from ssd_runtime.weights.linear import Linear, PackedMemory, stamp_of

INJECTION = ("per_layer_input_gate", "per_layer_projection")
"""The projections of an injection, in a layer."""
DIGITS = (1 << 16, 1 << 8, 1)
"""Values of the three digits of a token, each up to 255: half precision holds them exactly."""
DIGIT = 2.0**-20
"""The number that stands for a digit of 1, so small that comparisons of states do not see it."""


class LayerInputs:
    """The inputs of all layers for some rows, from their tokens.

    A forward may begin at any sub-layer, from states that a search or an early exit has kept. So a row of states
    [hidden + 3] carries its token after the residual stream, as three digits.
    """

    def __init__(
        self, base: Any, family: Family, memory: PackedMemory, beside: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """`base` is the user's base model; each layer receives a vector [width] for each row.

        torch's own work runs within `beside` (`Decoder.beside_steps`).
        """
        self._base, self._width = base, input_width(base.config, family)
        self._hidden: int = base.config.hidden_size
        self.projection = Linear(base, ("per_layer_model_projection",), memory)
        self._norm = Norm(base, "per_layer_projection_norm", family.norm_offset)
        self._beside = beside
        self._stamp = stamp_of([base.embed_tokens_per_layer])

    def carried(self, x: Tensor, tokens: Tensor) -> Tensor:
        """States [n, hidden + 3] of embeddings `x` [n, hidden] and their tokens [n]."""
        digits = [tokens // value % 256 for value in DIGITS]
        return torch.cat([x, (torch.stack(digits, -1) * DIGIT).to(x.dtype)], -1)

    def of(self, states: Tensor) -> Tensor:
        """The inputs [layers, n, width] of the rows of `states` [n, hidden + 3]."""
        with self._beside():
            digits = (states[:, self._hidden :].double() / DIGIT).round().long()
            values = torch.tensor(DIGITS, device=digits.device)
            # States that a check makes up carry no token.
            tokens = (digits * values).sum(-1).clamp_(0, self._base.embed_tokens.num_embeddings - 1)
            rows = len(tokens)
            tokens = tokens.repeat(2) if rows == 1 else tokens  # kernels round one row differently from two
            own = self._base.embed_tokens_per_layer(tokens).unflatten(-1, (-1, self._width))
            embedded = self._base.embed_tokens(tokens)
        projected = self.projection(embedded)
        with self._beside():
            normed = self._norm((projected * self._hidden**-0.5).unflatten(-1, (-1, self._width)))
            return ((normed + own) * 2**-0.5)[:rows].transpose(0, 1).contiguous()

    def refresh(self) -> bool:
        """Follow changes of the user's modules; returns whether there were any."""
        before, self._stamp = self._stamp, stamp_of([self._base.embed_tokens_per_layer])
        return any([self.projection.refresh(), self._norm.refresh(), self._stamp != before])


def input_width(config: PreTrainedConfig, family: Family) -> int:
    """The size of the vector that each layer receives for a row's token; 0 without one."""
    return int(setting(config, family.layer_inputs) or 0)


@dataclass(frozen=True, slots=True)
class Injection:
    """Adds norm(W_out (activation(W_gate x) × input)) after a layer's MLP; `LayerInputs` has each row's input."""

    gate: Linear | LightLinear
    activation: LayerActivation
    output: Linear | LightLinear
    norm: Norm

    @classmethod
    def of(cls, layer: Any, family: Family, memory: PackedMemory) -> Injection:
        """The injection of a transformers decoder layer."""
        return cls(
            gate=Linear(layer, INJECTION[:1], memory),
            activation=LayerActivation(layer, "act_fn"),
            output=Linear(layer, INJECTION[1:], memory),
            norm=Norm(layer, "post_per_layer_input_norm", family.norm_offset),
        )

    def added(self, x: Tensor, inputs: Tensor) -> Tensor:
        """`x` [n, hidden] with what `inputs` [n, width] add to it."""
        return x + self.norm(self.output(self.activation(self.gate(x)) * inputs))

    @property
    def native(self) -> Injected | None:
        """This in our own code; None where that does not serve it."""
        gate, output, activation, norm = self.gate.fused, self.output.fused, self.activation.native, self.norm.rms
        if gate is None or output is None or activation is None or norm is None:
            return None
        return Injected(gate=gate, output=output, activation=activation, norm=norm)

    def linears(self) -> tuple[Linear, ...]:
        """The projections but light copies."""
        return tuple(each for each in (self.gate, self.output) if isinstance(each, Linear))

    def light(self, bits: int) -> Injection:
        """This on the light copies of its projections (`Linear.light`), as far as it has these."""
        return replace(self, gate=self.gate.light(bits), output=self.output.light(bits))

    def refresh(self) -> bool:
        """Follow changes of the user's modules; returns whether there were any."""
        parts: list[Linear | LayerActivation | Norm] = [*self.linears(), self.activation, self.norm]
        changed = [part.refresh() for part in parts]
        return any(changed)
