"""Random weights of our own kernels."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from ssd_runtime.weights.kernels.native import GROUP, Native, quantised_groups


def weight4(out: int, width: int, bias: bool = False) -> tuple[Native, Tensor]:
    """A random 4-bit weight and its numbers."""
    levels = torch.randint(0, 16, (out, width), dtype=torch.uint8)
    scale = (torch.rand(out, width // GROUP) + 0.1).half().float()
    least = torch.randn(out, width // GROUP).half().float()
    numbers = torch.randn(out) if bias else None
    dense = levels.unflatten(1, (-1, GROUP)) * scale[..., None] + least[..., None]
    return Native.of4(levels, scale, least + 8 * scale, numbers), dense.flatten(1)


def weight8(out: int, width: int) -> tuple[Native, Tensor]:
    """A random 8-bit weight and its numbers."""
    levels, scale = quantised_groups(torch.randn(out, width))
    return Native.of8(levels, scale), (levels.unflatten(1, (-1, GROUP)) * scale[..., None]).flatten(1)


def weight16(out: int, width: int, dtype: torch.dtype | None = None) -> tuple[Native, Tensor]:
    """A random weight in bf16 or fp16 and its numbers."""
    weight = torch.randn(out, width).to(dtype or random.choice([torch.bfloat16, torch.float16]))
    return Native.of16(weight), weight.float()
