"""Reads the blocks of GGUF's quantised tensors for aten's kernels, and as numbers.

In the formats of 4 bits here, a group of 32 columns shares a scale, and a weight is (level - 8) × scale + zero. Layouts
are those of ggml's `block_q4_0`, `block_q4_1` and `block_q4_K`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize
from numpy.typing import NDArray
from torch import Tensor


def _is_read(kind: Type) -> bool:
    """Whether the `gguf` library dequantises a block of a type."""
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


DENSE = (Type.F32, Type.F16, Type.BF16)
"""Types that are not quantised."""
UNREADABLE = frozenset(kind for kind in Type if not _is_read(kind))
"""Types that hold no weights, or that the installed `gguf` library does not dequantise."""
LEVELS4 = {Type.Q4_0: 18, Type.Q4_1: 20, Type.Q4_K: 144}
"""Bytes of a block of the types that aten's kernel of 4 bits can hold."""
ROWS_AT_ONCE = 4096
"""Rows that are in memory in fp32 while a tensor is requantised."""


class Levels4(NamedTuple):
    """A 4-bit weight: `levels` uint8 [out, in] from 0 to 15, `scale` and `zero` fp32 [out, in / 32]."""

    levels: Tensor
    scale: Tensor
    zero: Tensor


def levels4(data: NDArray[np.uint8], kind: Type) -> Levels4:
    """The 4-bit weight in blocks `data` [out, bytes] of a type in `LEVELS4`."""
    blocks = torch.from_numpy(np.array(data)).view(len(data), -1, LEVELS4[kind])
    if kind == Type.Q4_K:
        return _q4_k(blocks)
    scale = _from_fp16_bytes(blocks[..., 0:2])
    low, high = blocks[..., -16:] & 15, blocks[..., -16:] >> 4
    zero = torch.zeros_like(scale) if kind == Type.Q4_0 else _from_fp16_bytes(blocks[..., 2:4]) + 8 * scale
    return Levels4(torch.cat([low, high], -1).flatten(1), scale, zero)


def _q4_k(blocks: Tensor) -> Levels4:
    """Blocks [out, n, 144] of 256 columns: scales and minima of eight groups are 6-bit shares of two fp16 numbers."""
    scale, least = _from_fp16_bytes(blocks[..., 0:2])[..., None], _from_fp16_bytes(blocks[..., 2:4])[..., None]
    first, second, rest = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat([first & 63, (rest & 15) | (first >> 6 << 4)], -1) * scale
    minima = torch.cat([second & 63, (rest >> 4) | (second >> 6 << 4)], -1) * least
    pairs = blocks[..., 16:].unflatten(-1, (4, 32))
    levels = torch.stack([pairs & 15, pairs >> 4], -2)
    return Levels4(levels.flatten(1), scales.flatten(1), (8 * scales - minima).flatten(1))


def _from_fp16_bytes(pairs: Tensor) -> Tensor:
    """Pairs of bytes [..., 2] as the fp16 numbers [...] that they are, in fp32."""
    return pairs.contiguous().view(torch.float16)[..., 0].float()


def dense_parts(data: NDArray[np.uint8], kind: Type) -> Iterator[Tensor]:
    """The tensor of blocks `data` [out, bytes] in fp32, some rows at a time."""
    return (dense(data[begin : begin + ROWS_AT_ONCE], kind) for begin in range(0, len(data), ROWS_AT_ONCE))


def dense(data: NDArray[np.uint8], kind: Type) -> Tensor:
    """The tensor of blocks or numbers `data` in fp32."""
    if kind == Type.Q8_0:
        blocks = torch.from_numpy(np.array(data)).unflatten(-1, (-1, 34))  # an fp16 scale and 32 levels each
        return (blocks[..., 2:].view(torch.int8) * _from_fp16_bytes(blocks[..., :2])[..., None]).flatten(-2)
    return torch.from_numpy(np.array(dequantize(data, kind), dtype=np.float32))
