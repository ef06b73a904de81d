"""Rotary position embedding from a table of the model's own angles."""

from __future__ import annotations

from threading import Lock
from typing import Protocol

import torch
from torch import Tensor


class RotaryModule(Protocol):
    """What transformers' rotary modules offer."""

    def __call__(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, each [1, n, head_dim], of `position_ids` [1, n] in the dtype of `x`."""
        ...


class RotaryTable:
    """cos and signed sin of positions 0, 1, …, computed by the model's own module and kept.

    Holds only for rotary types whose angles depend on the position alone (`families.ROPE_TYPES`).
    """

    def __init__(self, module: RotaryModule, like: Tensor) -> None:
        self._module, self._like = module, like
        self._lock = Lock()
        self._tables = self._compute(256)

    def rows(self, positions: Tensor | slice, end: int) -> tuple[Tensor, Tensor]:
        """cos and signed sin, each [n, 1, head_dim], of positions below `end`."""
        cos, sin = self._tables
        if end > cos.shape[0]:
            with self._lock:
                if end > self._tables[0].shape[0]:
                    self._tables = self._compute(max(end, 2 * self._tables[0].shape[0]))
            cos, sin = self._tables
        return cos[positions], sin[positions]

    def _compute(self, length: int) -> tuple[Tensor, Tensor]:
        positions = torch.arange(length, device=self._like.device)[None]
        cos, sin = self._module(self._like, positions)
        half = cos.shape[-1] // 2
        # rotate_half(x) = cat(-x2, x1) is a roll by half with the first half negated: the sign goes into sin.
        signed = torch.cat([-sin[..., :half], sin[..., half:]], -1)
        return cos[0, :, None].contiguous(), signed[0, :, None].contiguous()


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `heads` [n, heads, head_dim] by rows of a `RotaryTable`."""
    return heads * cos + heads.roll(heads.shape[-1] // 2, -1) * sin
