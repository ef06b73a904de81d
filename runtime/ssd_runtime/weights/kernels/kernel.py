"""The interface of all kernels."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Kernel(Protocol):
    """A weight [out, in] in a layout of its own, with the multiplication that reads it.

    A kernel may compute a row differently, in the last bits, where other rows stand beside it. Kernels that serve one
    model differ from each other in rounding only. So none of them scales activations by what it sees.
    """

    name: str
    """The kernel's name in messages and latency keys."""
    rounding: torch.dtype
    """The dtype to which rows are rounded before they are multiplied."""

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
