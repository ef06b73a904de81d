"""LFM2's gated short convolution."""

from __future__ import annotations

import torch
from torch import Tensor

from ssd_runtime.model.mixers.mixer import Finish, Mixer, State
from ssd_runtime.weights.kernels.native_recurrence import NativeRecurrence


class ShortConvolution(Mixer):
    """C × conv(B × x), where a row's projection is B, C and x. The state is the last inputs of the convolution."""

    name = "conv"
    module = "conv"
    projections = ("in_proj",)
    convolution = "conv"

    def _build(self) -> int:
        self.native = NativeRecurrence.of(self._taps, self._bias)
        return self._taps.shape[1]

    def finish(self) -> Finish:
        """Nothing but the gates."""
        return Finish()

    def empty(self) -> State:
        """The state before the first token."""
        return (self._window(self.width),)

    def inputs(self, projected: Tensor) -> Tensor:
        """B × x of projected rows."""
        gate, _, x = projected.chunk(3, -1)
        return gate * x

    def _scan(self, state: State, inputs: Tensor) -> tuple[Tensor, State]:
        mixed, window = self._convolved(state[0], inputs)
        return mixed.to(inputs.dtype), (window,)

    def apart(self, state: State, inputs: Tensor) -> Tensor:
        """The convolution at rows each of which follows `state`."""
        return self._convolved_apart(state[0], inputs).to(inputs.dtype)

    def _shaped(self, outputs: Tensor) -> Tensor:
        return outputs.flatten(1)

    def _finished(self, mixed: Tensor, projected: Tensor) -> Tensor:
        """C × the convolution."""
        return torch.mul(projected.chunk(3, -1)[1], mixed)
