"""aten's product of bf16 rows with 4-bit weights, which have a scale and a zero per group of columns."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

GROUP = 32
"""Columns that share a scale, as in GGUF's Q4_0, Q4_1 and Q4_K."""
OUT_MULTIPLE = 16
"""The kernel packs so many outputs at a time."""
SHARES = (0.95, 0.9, 0.85, 0.8)
"""Shares of a group's range that are tried besides the whole: a narrower grid cuts its ends and is finer within."""
LEAST_SCALE = 1e-30
"""Scale of groups whose weights are all equal."""


class Int4:
    """A weight (levels - 8) × scale + zero, with scales and zeros rounded to bf16.

    `levels` [out, in] are from 0 to 15; `scale` and `zero` are [out, in / 32].
    """

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


class Rounded4(NamedTuple):
    """A weight [out, in] on a 4-bit grid."""

    levels: Tensor
    """[out, in], uint8 from 0 to 15."""
    scale: Tensor
    """[out, in / 32]."""
    zero: Tensor
    """[out, in / 32]."""
    error: Tensor
    """Squared error of each group [out, in / 32]."""


def quantised4(weight: Tensor) -> Rounded4:
    """Round a weight [out, in] to 4 bits, with scales and zeros that bf16 holds exactly.

    Each group takes the range, of several shares of its own, whose levels are nearest to its weights. A weight that
    lies on a 4-bit grid with a level at either end is met up to the rounding of scales and zeros.
    """
    groups = weight.float().unflatten(1, (-1, GROUP))
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scale, zero = _grid(low, high, 1.0)
    error = _error(groups, scale, zero)
    for share in SHARES:
        other = _grid(low, high, share)
        better = (found := _error(groups, *other)) < error
        scale, zero, error = (
            torch.where(better, *each) for each in ((other[0], scale), (other[1], zero), (found, error))
        )
    levels = (_levels(groups, scale, zero) + 8).to(torch.uint8)
    return Rounded4(levels.flatten(1), scale[..., 0], zero[..., 0], error[..., 0])


def _grid(low: Tensor, high: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """The scale and the zero of 16 levels over a share of the ranges [out, groups, 1]."""
    scale = (share * (high - low) / 15).clamp(min=LEAST_SCALE).to(torch.bfloat16).float()
    return scale, ((low + high + scale) / 2).to(torch.bfloat16).float()


def _levels(groups: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """The levels, from -8 to 7, that are nearest to groups [out, groups, 32]."""
    return (groups - zero).div_(scale).round_().clamp_(-8, 7)


def _error(groups: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """The squared error of each of the groups [out, groups, 1]."""
    return _levels(groups, scale, zero).mul_(scale).add_(zero).sub_(groups).square_().sum(-1, keepdim=True)
