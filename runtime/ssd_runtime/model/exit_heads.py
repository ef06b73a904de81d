"""What the state behind an inner layer says of the next token."""

from __future__ import annotations

import torch
from torch import Tensor

from ssd_artifacts.exits import ExitSet
from ssd_runtime.model.decoder import Decoder


class ExitHeads:
    """A token and its probability behind any layer.

    Behind layers with a fitted map, the normed state is carried over to what the last layer would make of it; the
    model's own head does the rest. Elsewhere it gets the normed state as it is.
    """

    def __init__(self, decoder: Decoder, fitted: ExitSet | None = None) -> None:
        self._decoder = decoder
        self._maps: dict[int, tuple[Tensor, Tensor]] = {}
        if fitted is not None:
            for place, layer in enumerate(fitted.layers):
                weight = torch.from_numpy(fitted.weights[place]).to(decoder.device, decoder.dtype)
                bias = torch.from_numpy(fitted.biases[place]).to(decoder.device, decoder.dtype)
                self._maps[layer] = weight, bias

    @property
    def fitted(self) -> tuple[int, ...]:
        """Numbers of layers, from 1, behind which there is a fitted map."""
        return tuple(self._maps)

    def logits(self, layer: int, x: Tensor) -> Tensor:
        """Logits [n, vocabulary] of states `x` [n, hidden] after `layer` layers."""
        return self._decoder.head(self.carried(layer, x))

    def carried(self, layer: int, x: Tensor) -> Tensor:
        """Normed states [n, hidden] that the model's head takes, from states `x` [n, hidden] after `layer` layers."""
        normed = self._decoder.norm(x)
        if layer in self._maps:
            weight, bias = self._maps[layer]
            normed = torch.addmm(bias, normed, weight)
        return normed
