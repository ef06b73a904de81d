"""The ending of a layer of Gemma-4 as one call of our own code (`native/ending.h`)."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from ssd_runtime.weights.kernels.kernel import RmsNorm
from ssd_runtime.weights.kernels.native import Native, required_library
from ssd_runtime.weights.kernels.native_mlp import Activation
from ssd_runtime.weights.native.library import COUNT, POINTER, fields


class Injected(NamedTuple):
    """norm(W_output (activation(W_gate x) × input)), where a row's token gives the layer an input."""

    gate: Native
    output: Native
    activation: Activation
    norm: RmsNorm


class _Ending(ctypes.Structure):
    _fields_ = (*fields(POINTER, "gate output activation norm factor"), *fields(COUNT, "hidden"))


class NativeEnding:
    """The last part of a layer, after its MLP: factor × (x + what is injected)."""

    def __init__(self, hidden: int, factor: Tensor | None, injected: Injected | None) -> None:
        """`factor` [1] is in fp32, and read in each call; None for 1."""
        self._injected, self._factor = injected, factor  # what the structure points to
        self._about = _Ending(hidden=hidden, factor=None if factor is None else factor.data_ptr())
        if injected is not None:
            self._about.gate, self._about.output = injected.gate.address, injected.output.address
            self._about.activation, self._about.norm = ctypes.addressof(injected.activation), injected.norm.address
        self.address = ctypes.addressof(self._about)

    @property
    def width(self) -> int:
        """The numbers of a row's input; 0 without one."""
        return 0 if self._injected is None else self._injected.output.in_features

    @property
    def sizes(self) -> tuple[int, ...]:
        """Endings of equal sizes take equal memory (`floats`)."""
        of = self._injected
        return (1,) if of is None else (of.gate.row_floats, of.output.row_floats, self.width)

    def floats(self, n: int) -> int:
        """The numbers of memory that a call of `n` rows takes."""
        return n * sum(self.sizes)

    def __call__(self, x: Tensor, inputs: Tensor | None) -> Tensor:
        """The states [n, hidden] after the layer for fp32 states `x` [n, hidden] and rows' `inputs` [n, width].

        Raises RuntimeError if sizes do not agree.
        """
        x = x.contiguous()
        n = x.shape[0]
        found = required_library() if self._injected is None else self._injected.gate.library
        inputs = None if inputs is None else inputs.contiguous()
        given = (None, 0) if inputs is None else (inputs.data_ptr(), inputs.nbytes)
        size = self.floats(n)
        return found.write(torch.empty_like(x), size, found.end_layer, self.address, *given, x.data_ptr(), x.nbytes, n)
