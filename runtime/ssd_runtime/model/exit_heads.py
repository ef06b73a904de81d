"""Predicts the next token from the state after an inner layer."""

from __future__ import annotations

import torch
from torch import Tensor

from ssd_artifacts.exits import ExitSet
from ssd_runtime.model.decoder import Decoder


class ExitHeads:
    """Logits after any layer, by the model's own head.

    After layers with a fitted map, the map takes the normed state to a prediction of the last layer's. After other
    layers the head has the normed state itself.
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
        """Numbers, from 1, of the layers that a fitted map follows."""
        return tuple(self._maps)

    def logits(self, layer: int, x: Tensor) -> Tensor:
        """Logits [n, vocabulary] of states `x` [n, hidden] after `layer` layers."""
        return self._decoder.head(self.carried(layer, x))

    def carried(self, layer: int, x: Tensor) -> Tensor:
        """Normed states [n, hidden] for the model's head, from states `x` [n, hidden] after `layer` layers."""
        normed = self._decoder.head.norm(x)
        if layer in self._maps:
            weight, bias = self._maps[layer]
            normed = torch.addmm(bias, normed, weight)
        return normed
