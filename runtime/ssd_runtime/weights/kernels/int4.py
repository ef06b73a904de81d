"""aten's product of bf16 rows with 4-bit weights, which have a scale and a zero per group of columns."""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 32
"""Columns that share a scale, as in GGUF's Q4_0, Q4_1 and Q4_K."""
OUT_MULTIPLE = 16
"""The kernel packs so many outputs at a time."""


class Int4:
    """A weight (levels - 8) × scale + zero, with scales and zeros rounded to bf16.

    `levels` [out, in] are from 0 to 15; `scale` and `zero` are [out, in / 32].
    """

    __slots__ = ("_bias", "_levels", "_scales", "out_features")

    name = "int4"
    rounding = torch.bfloat16

    def __init__(self, levels: Tensor, scale: Tensor, zero: Tensor, bias: Tensor | None = None) -> None:
        self._levels: Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(levels.to(torch.int32), 1)
        self._scales = torch.stack([scale.T, zero.T], -1).to(torch.bfloat16).contiguous()
        self._bias = bias
        self.out_features = levels.shape[0]

    @staticmethod
    def can_serve(out_features: int, in_features: int) -> bool:
        """Whether a weight of these sizes can be packed."""
        return out_features % OUT_MULTIPLE == 0 and in_features % GROUP == 0

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weight."""
        return self._levels.nbytes + self._scales.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """The product [n, out] of rows `x` [n, in]."""
        y = torch.ops.aten._weight_int4pack_mm_for_cpu(x.to(torch.bfloat16), self._levels, GROUP, self._scales)
        y = y.to(x.dtype)
        return y if self._bias is None else y.add_(self._bias)
