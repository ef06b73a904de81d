"""Light copies of dense weights, which only drafts multiply by."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ssd_runtime.weights.draft_bits import DraftBits
from ssd_runtime.weights.kernels.formats import TILE
from ssd_runtime.weights.kernels.int4 import GROUP, Int4, quantised4
from ssd_runtime.weights.kernels.int8 import Int8, quantised
from ssd_runtime.weights.kernels.kernel import Kernel, RowNorm, capped
from ssd_runtime.weights.kernels.native import Native, rounded

ON_GRID = 0.02
"""Largest relative change, in root mean squares, by which rounding to 4 bits leaves a weight on its grid. Rounding the
scales to bf16 changes a weight by about 0.3%, rounding one that lies on no grid by 8% or more."""
NUMBERS_AT_ONCE = 1 << 18
"""Weights that are rounded at a time. It takes several copies of them in fp32, which fit a processor's cache."""


class LightLinear:
    """Projections on a light copy of their weights, or on a part of these weights' bits, called like `Linear`."""

    fused: Native | None
    """The kernel if it computes all of the projections with norm and residual in fp32."""
    natives: Sequence[Native]
    """Our own kernels that compute the projections side by side in fp32; none where another has a part in it."""

    def __init__(self, kernels: Sequence[Kernel], dtype: torch.dtype) -> None:
        """The outputs of `kernels` lie side by side; `dtype` is that of the rows."""
        self.kernels = kernels
        natives = [kernel for kernel in kernels if isinstance(kernel, Native)]
        self.natives = natives if len(natives) == len(kernels) and dtype == torch.float32 else ()
        self.fused = self.natives[0] if len(self.natives) == 1 else None

    @property
    def nbytes(self) -> int:
        """Bytes that it takes beside the weights themselves."""
        return sum(kernel.nbytes for kernel in self.kernels)

    def light(self, bits: int) -> LightLinear:
        """These projections, which have no copies of their own."""
        return self

    def __call__(
        self, x: Tensor, norm: RowNorm | None = None, residual: Tensor | None = None, cap: float | None = None
    ) -> Tensor:
        """The projections of `norm(x)`, `x` [n, in], plus `residual` [n, out]; or `capped`, without a residual."""
        if self.fused is not None and (norm is None or norm.rms is not None):
            return self.fused.fused(x, None if norm is None else norm.rms, residual, cap)
        x = x if norm is None else norm(x)
        parts = [kernel(x) for kernel in self.kernels]
        y = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        return capped(y, cap) if residual is None else residual + y


def can_lighten(weight: Tensor) -> bool:
    """Whether there is a kernel for a light copy of a weight [out, in] on its device."""
    return weight.device.type == "cpu" and weight.is_floating_point() and Int8.can_serve(weight.shape[1])


def most_bytes(out: int, columns: int, bits: DraftBits, both: bool = False) -> int:
    """Bytes that light copies of a weight [out, columns] take at most (`light_kernels`).

    Whether that of `auto` has 4 or 8 bits turns out once it is made.
    """
    fours = serves4(out, columns)
    out = -(-out // TILE) * TILE
    scales = out * columns // GROUP * 4
    most = (out * columns // 2 if bits == "4" and fours else out * columns) + scales
    return most + out * columns // 2 + scales if both and bits == "auto" and fours else most


def light_kernels(weight: Tensor, bias: Tensor | None, bits: DraftBits, both: bool = False) -> dict[int, Kernel]:
    """Copies of a weight [out, in] by their bits, 8 or 4; 8 serve where no kernel of 4 can.

    `auto` makes one in 4 bits if the weight lies on such a grid. Otherwise it makes one in 8 bits, and with `both`
    one in 4 bits beside that.
    """
    lighten = _native if Native.can_serve(weight.shape[1]) else _aten
    copies = dict[int, Kernel]()
    if bits != "8" and serves4(*weight.shape):
        kernel, error = lighten(weight, bias, 4)
        only = bits == "4" or error <= ON_GRID
        if only or both:
            copies[4] = kernel
        if only:
            return copies
    copies[8], _ = lighten(weight, bias, 8)
    return copies


def _native(weight: Tensor, bias: Tensor | None, bits: int) -> tuple[Kernel, float]:
    """A weight in 4 or 8 bits, and the root mean square of its change relative to its own."""
    found = rounded(weight.detach(), bits)
    kernel = Native.of_blocks(found.kept, [found.blocks], weight.shape[1], bias)
    return kernel, math.sqrt(found.error / found.squares) if found.squares else 0.0


def _aten(weight: Tensor, bias: Tensor | None, bits: int) -> tuple[Kernel, float]:
    parts = weight.split(-(-NUMBERS_AT_ONCE // weight.shape[1]))
    if bits == 8:
        levels, scale = (torch.cat(each) for each in zip(*(quantised(rows.float()) for rows in parts), strict=True))
        return Int8(levels, scale, bias), 0.0
    levels, scale, zero, error = (torch.cat(each) for each in zip(*map(quantised4, parts), strict=True))
    squares = sum(float(rows.float().square().sum()) for rows in parts)
    return Int4(levels, scale, zero, bias), math.sqrt(float(error.sum()) / squares) if squares else 0.0


def serves4(out_features: int, in_features: int) -> bool:
    """Whether a kernel takes 4-bit weights of these sizes."""
    return Native.can_serve(in_features) or Int4.can_serve(out_features, in_features)
