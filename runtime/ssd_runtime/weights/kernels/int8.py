"""aten's product of bf16 rows with 8-bit weights, which have a scale per output."""

from __future__ import annotations

import torch
from torch import Tensor

COLUMN_MULTIPLE = 32
"""The kernel reads so many columns at a time."""


class Int8:
    """A weight levels × scale, with `levels` int8 [out, in] and `scale` [out] rounded to bf16."""

    name = "int8"
    rounding = torch.bfloat16

    def __init__(self, levels: Tensor, scale: Tensor, bias: Tensor | None = None) -> None:
        self._levels = levels
        self._scale = scale.to(torch.bfloat16)
        self._bias = bias
        self.out_features = levels.shape[0]

    @staticmethod
    def can_serve(in_features: int) -> bool:
        """Whether a weight of so many columns can be multiplied; aten's kernel reads beyond rows of other lengths."""
        return in_features % COLUMN_MULTIPLE == 0

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weight."""
        return self._levels.nbytes + self._scale.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """The product [n, out] of rows `x` [n, in]."""
        y = torch.ops.aten._weight_int8pack_mm(x.to(torch.bfloat16), self._levels, self._scale).to(x.dtype)
        return y if self._bias is None else y.add_(self._bias)


def quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Levels [out, in] and scales [out] of a weight [out, in], with scales that bf16 holds exactly."""
    scale = (weight.abs().amax(1) / 127).to(torch.bfloat16).float().clamp_(min=1e-30)
    return (weight / scale[:, None]).round_().clamp_(-128, 127).to(torch.int8), scale
