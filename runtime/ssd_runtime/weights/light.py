"""Lighter copies of dense weights, which only drafts multiply by."""

from __future__ import annotations

import torch
from torch import Tensor

from ssd_runtime.weights.draft_bits import DraftBits
from ssd_runtime.weights.kernels.int4 import GROUP, Int4, quantised4
from ssd_runtime.weights.kernels.int8 import Int8, quantised
from ssd_runtime.weights.kernels.kernel import Kernel

ON_GRID = 0.02
"""Largest relative change, in root mean squares, by which rounding to 4 bits leaves a weight on its grid. Rounding the
scales to bf16 changes a weight by about 0.3%, rounding one that lies on no grid by 8% or more."""
ROWS_AT_ONCE = 4096
"""Outputs that are rounded at a time, since that takes several copies of them in fp32."""


def can_lighten(weight: Tensor) -> bool:
    """Whether there is a kernel for a lighter copy of a weight [out, in] on its device."""
    return weight.device.type == "cpu" and weight.is_floating_point() and Int8.can_serve(weight.shape[1])


def most_bytes(weight: Tensor, bits: DraftBits) -> int:
    """Bytes that a lighter copy takes at most: that of `auto` turns out to have 4 or 8 bits once it is made."""
    out, columns = weight.shape
    if bits == "4" and Int4.can_serve(out, columns):
        return out * columns // 2 + out * columns // GROUP * 4
    return out * columns + 2 * out


def light_kernel(weight: Tensor, bias: Tensor | None, bits: DraftBits) -> Kernel:
    """Copy a weight [out, in] in 8 or 4 bits; 8 serve where the kernel of 4 cannot."""
    parts = weight.split(ROWS_AT_ONCE)
    if bits != "8" and Int4.can_serve(*weight.shape):
        fours = [quantised4(rows) for rows in parts]
        error = sum(float(each.error.sum()) for each in fours)
        if bits == "4" or error <= ON_GRID**2 * sum(float(rows.float().square().sum()) for rows in parts):
            return Int4(
                levels=torch.cat([each.levels for each in fours]),
                scale=torch.cat([each.scale for each in fours]),
                zero=torch.cat([each.zero for each in fours]),
                bias=bias,
            )
    eights = [quantised(rows.float()) for rows in parts]
    return Int8(torch.cat([levels for levels, _ in eights]), torch.cat([scale for _, scale in eights]), bias)
