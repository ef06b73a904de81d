"""Random weights of our own kernels."""

from __future__ import annotations

import random

import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray
from torch import Tensor

from ssd_runtime.weights.gguf.blocks import dense
from ssd_runtime.weights.kernels.formats import Q4_1, Q8_0
from ssd_runtime.weights.kernels.native import GROUP, Native, rounded


def native4(levels: Tensor, scale: Tensor, least: Tensor, bias: Tensor | None = None) -> Native:
    """A weight levels × scale + least: levels from 0 to 15 [out, in], scale and least [out, in / 32]."""
    low, high = levels.to(torch.uint8).unflatten(1, (-1, 2, GROUP // 2)).unbind(2)
    return Native.of_blocks(Q4_1, [_blocks(low | high << 4, scale, least)], levels.shape[1], bias)


def native8(levels: Tensor, scale: Tensor) -> Native:
    """A weight levels × scale: levels int8 [out, in], scale [out, in / 32], rounded to fp16."""
    blocks = _blocks(levels.view(torch.uint8).unflatten(1, (-1, GROUP)), scale)
    return Native.of_blocks(Q8_0, [blocks], levels.shape[1])


def _blocks(levels: Tensor, *scales: Tensor) -> NDArray[np.uint8]:
    """Blocks [out, bytes] as in a `.gguf` file, of scales [out, groups] and bytes of levels [out, groups, n]."""
    pairs = [each.to(torch.float16)[..., None].view(torch.uint8) for each in scales]
    found: NDArray[np.uint8] = torch.cat([*pairs, levels], -1).flatten(1).numpy()
    return found


def weight4(out: int, width: int, bias: bool = False) -> tuple[Native, Tensor]:
    """A random 4-bit weight and its numbers."""
    levels = torch.randint(0, 16, (out, width), dtype=torch.uint8)
    scale = (torch.rand(out, width // GROUP) + 0.1).half().float()
    least = torch.randn(out, width // GROUP).half().float()
    added = torch.randn(out) if bias else None
    numbers = levels.unflatten(1, (-1, GROUP)) * scale[..., None] + least[..., None]
    return native4(levels, scale, least, added), numbers.flatten(1)


def weight8(out: int, width: int) -> tuple[Native, Tensor]:
    """A random 8-bit weight and its numbers."""
    blocks = rounded(torch.randn(out, width), 8).blocks
    return Native.of_blocks(Q8_0, [blocks], width), dense(blocks, Type.Q8_0)


def weight16(out: int, width: int, dtype: torch.dtype | None = None) -> tuple[Native, Tensor]:
    """A random weight in bf16 or fp16 and its numbers."""
    weight = torch.randn(out, width).to(dtype or random.choice([torch.bfloat16, torch.float16]))
    return Native.of16(weight), weight.float()
