"""The interface of all kernels."""

from __future__ import annotations

import ctypes
from typing import Protocol

import torch
from torch import Tensor


class Kernel(Protocol):
    """A weight [out, in] in a layout of its own, with the multiplication that reads it.

    A row's last bits may depend on the rows beside it, and on which kernel serves this weight for their number. A
    kernel that quantises activations must therefore serve every number of rows of its weight: mixing it with a dense
    kernel would change outputs.
    """

    name: str
    """The kernel's name in messages and latency keys."""
    rounding: torch.dtype
    """The dtype to which rows are rounded before they are multiplied; int8 where groups of columns have a scale."""

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weight."""
        ...

    @property
    def out_features(self) -> int:
        """Columns of the product."""
        ...

    def __call__(self, x: Tensor) -> Tensor:
        """The product [n, out] of rows `x` [n, in], in the dtype of `x`."""
        ...


class _Norm(ctypes.Structure):
    _fields_ = (("weight", ctypes.c_void_p), ("bytes", ctypes.c_int64), ("epsilon", ctypes.c_float))


class RmsNorm:
    """An RMS norm, x / sqrt(mean(x²) + epsilon) × weight, with `weight` [hidden] contiguous and in fp32."""

    def __init__(self, weight: Tensor, epsilon: float) -> None:
        self.weight = weight
        self._about = _Norm(weight.data_ptr(), weight.nbytes, epsilon)
        self.address = ctypes.addressof(self._about)
        """Address of the norm as a C struct (`Norm` in `native/rows.h`)."""


class _Connection(ctypes.Structure):
    _fields_ = (("norm", ctypes.c_void_p), ("after", ctypes.c_void_p), ("factor", ctypes.c_float))


class Connection:
    """A block's connection to the residual stream: its result is x + factor × after(block(norm(x))).

    Where a block of our own code is given None in place of one, its result is its output alone.
    """

    def __init__(self, norm: RmsNorm | None = None, after: RmsNorm | None = None, factor: float = 1.0) -> None:
        """None is for no norm."""
        self.norm, self.after, self.factor = norm, after, factor
        self._about = _Connection(*(None if each is None else each.address for each in (norm, after)), factor)
        self.address = ctypes.addressof(self._about)
        """Address of the connection as a C struct (`Connection` in `native/rows.h`)."""


def computes(kernel: Kernel, weight: Tensor, bias: Tensor | None, begin: int, tolerance: float) -> bool:
    """Whether a kernel's outputs from `begin` on are the products of a weight [n, in] in fp32, and of its bias [n].

    They may differ by `tolerance`, relative to the products, in root mean squares.
    """
    probe = torch.linspace(-1, 1, weight.shape[1])[None].to(torch.bfloat16).float()
    expected = probe @ weight.T if bias is None else probe @ weight.T + bias
    return bool((kernel(probe)[:, begin : begin + len(weight)] - expected).norm() <= tolerance * expected.norm())


class RowNorm(Protocol):
    """The norm of a projection's input."""

    rms: RmsNorm | None
    """Numbers of this norm; None if it can only be called."""

    def __call__(self, x: Tensor) -> Tensor:
        """The normed rows of `x`."""
        ...


def capped(scores: Tensor, cap: float | None) -> Tensor:
    """Scores or logits squeezed smoothly into (-cap, cap), as Gemma does; unchanged without a cap."""
    return scores if cap is None else torch.tanh(scores / cap) * cap
