"""Orders the blocks of GGUF's tensors for our own code: the file's levels and scales, in tiles of outputs.

Layouts are those of ggml's `block_q4_0` and its like. A tile has as many bytes as the file has for its weights, but for
3.6% more in Q3_K.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray
from torch import Tensor

from ssd_runtime.weights.kernels import formats
from ssd_runtime.weights.kernels.formats import SIXTEEN, Format, by_tile, halves, in_bytes, tiles16, words_of

ROWS_AT_ONCE = 256
"""Rows whose levels are in memory one by one while a tensor is ordered; so few stay in a processor's cache."""
NUMBERS = {Type.BF16: torch.bfloat16, Type.F16: torch.float16}
"""The types whose tensors are no blocks but numbers of 16 bits."""
LARGEST_EXPONENT = 200
"""Largest exponent of MXFP4 that is served; it is 2^72, far above any model's."""


class Parts(NamedTuple):
    """A weight's levels uint8 [out, in], and the bytes of scales and headers, as `Format.tiles` takes them."""

    levels: Tensor
    scales: Tensor | None
    header: Tensor | None = None


def format_of(kind: Type) -> Format | None:
    """The format that keeps a file's type as it is; None where a weight must be requantised."""
    if kind in NUMBERS:
        return SIXTEEN[NUMBERS[kind]]
    found = _KINDS.get(kind)
    return found[0] if found is not None else None


def tiles_of(data: NDArray[np.uint8], kind: Type) -> Tensor:
    """The tiles [tiles, bytes] of blocks `data` [out, bytes], whose type has a format.

    Raises ValueError for scales that no model has.
    """
    if kind in NUMBERS:
        return tiles16(torch.from_numpy(np.array(data)).view(NUMBERS[kind]))
    kept, read = _KINDS[kind]
    size = GGML_QUANT_SIZES[kind][1]
    parts = []
    for begin in range(0, len(data), ROWS_AT_ONCE):
        rows = torch.from_numpy(np.array(data[begin : begin + ROWS_AT_ONCE]))
        parts.append(kept.tiles(*read(rows.view(len(rows), -1, size))))
    return torch.cat(parts)


def _fp16(pairs: Tensor) -> Tensor:
    """Pairs of bytes [..., 2] as the fp16 numbers [...] that they are."""
    return pairs.contiguous().view(torch.float16)[..., 0]


def _levels(words: Tensor) -> Tensor:
    """Levels uint8 [out, in] of words of four each."""
    return words.flatten(1).view(torch.uint8)


def _nibbles(packed: Tensor) -> Tensor:
    """Levels [out, in] of blocks whose bytes [out, n, 16] have columns i and i + 16."""
    return _levels(torch.cat(_both(words_of(packed)), -1))


def _nibbles_k(packed: Tensor) -> Tensor:
    """Levels [out, in] of blocks whose bytes [out, n, 128] have columns i and i + 32 of four times 64."""
    return _levels(torch.stack(_both(words_of(packed).unflatten(-1, (4, 8))), -2))


def _both(words: Tensor) -> list[Tensor]:
    """The low and the high four bits of every byte."""
    return [words & in_bytes(15), words >> 4 & in_bytes(15)]


def _q4_0(blocks: Tensor) -> Parts:
    return Parts(_nibbles(blocks[..., 2:]), halves(_fp16(blocks[..., :2])))


def _q4_1(blocks: Tensor) -> Parts:
    scales = torch.cat([halves(_fp16(blocks[..., 2 * i : 2 * i + 2])) for i in (0, 1)], -1)
    return Parts(_nibbles(blocks[..., 4:]), scales)


def _fifth_bits(packed: Tensor) -> Tensor:
    """The high bits [out, in] of blocks whose bytes [out, n, 4] have a bit per column, times 16."""
    bits = packed[..., None] >> torch.arange(8, dtype=torch.uint8) & 1
    return bits.flatten(1) << 4


def _q5_0(blocks: Tensor) -> Parts:
    levels = _nibbles(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6])
    return Parts(levels, halves(_fp16(blocks[..., :2])))


def _q5_1(blocks: Tensor) -> Parts:
    scales = torch.cat([halves(_fp16(blocks[..., 2 * i : 2 * i + 2])) for i in (0, 1)], -1)
    return Parts(_nibbles(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8]), scales)


def _q8_0(blocks: Tensor) -> Parts:
    return Parts((blocks[..., 2:] ^ 128).flatten(1), halves(_fp16(blocks[..., :2])))


def _header(*factors: Tensor) -> Tensor:
    """The factors of scales and of minima, pairs of bytes [out, n, 2] each."""
    return torch.cat([halves(_fp16(each)) for each in factors], -1)


def _sixes(packed: Tensor) -> Tensor:
    """Scales and minima of 6 bits, 12 bytes for eight of each [out, n, 12], as they lie in headers [tiles, n, 192]."""
    first, second, rest = words_of(packed).unbind(-1)
    four, two = in_bytes(15), in_bytes(3)
    lows = [first & four | (second & four) << 4, rest]
    highs = [first >> 4 & two | (second >> 4 & two) << 2, first >> 6 & two | (second >> 6 & two) << 2]
    low, high = (by_tile(_levels(torch.stack(each, -1))).unflatten(1, (-1, 2, 4)) for each in (lows, highs))
    return torch.cat([low.flatten(2), (high[:, :, 0] | high[:, :, 1] << 4).flatten(2)], -1)


def _q4_k(blocks: Tensor) -> Parts:
    header = torch.cat([_header(blocks[..., :2], blocks[..., 2:4]), _sixes(blocks[..., 4:16])], -1)
    return Parts(_nibbles_k(blocks[..., 16:]), None, header)


def _q5_k(blocks: Tensor) -> Parts:
    high = words_of(blocks[..., 16:48])
    bits = _levels(torch.stack([(high >> place & in_bytes(1)) << 4 for place in range(8)], -2))
    header = torch.cat([_header(blocks[..., :2], blocks[..., 2:4]), _sixes(blocks[..., 4:16])], -1)
    return Parts(_nibbles_k(blocks[..., 48:]) | bits, None, header)


def _of_halves(numbers: Tensor) -> Tensor:
    """Bytes [out, 2 × groups], one per half of a group, as [tiles, groups, 32]."""
    return by_tile(numbers).unflatten(1, (-1, 2)).flatten(2)


def _q6_k(blocks: Tensor) -> Parts:
    nibbles = torch.cat(_both(words_of(blocks[..., :128]).unflatten(-1, (2, 2, 8))), -2)
    levels = _levels(nibbles | _twos_k(blocks[..., 128:192]) << 4)
    return Parts(levels, _of_halves(blocks[..., 192:208].flatten(1)), _header(blocks[..., 208:]))


def _twos_k(packed: Tensor) -> Tensor:
    """Words [out, n, 2, 4, 8] of blocks whose bytes [out, n, 64] have columns i, i + 32, i + 64 and i + 96."""
    parts = words_of(packed).unflatten(-1, (2, 8))
    return torch.stack([parts >> shift & in_bytes(3) for shift in (0, 2, 4, 6)], -2)


def _q3_k(blocks: Tensor) -> Parts:
    places = torch.arange(8, dtype=torch.int32).view(2, 4, 1)
    high = words_of(blocks[..., :32])[..., None, None, :] >> places & in_bytes(1)
    levels = _levels(_twos_k(blocks[..., 32:96]) | high << 2)
    packed = blocks[..., 96:108]
    low = torch.cat([packed[..., :8] & 15, packed[..., :8] >> 4], -1)
    above = torch.cat([packed[..., 8:] >> shift & 3 for shift in (0, 2, 4, 6)], -1)
    scales = (low | above << 4).to(torch.int8) - 32
    return Parts(levels, _of_halves(scales.view(torch.uint8).flatten(1)), _header(blocks[..., 108:]))


def _q2_k(blocks: Tensor) -> Parts:
    header = _header(blocks[..., 80:82], blocks[..., 82:84])
    return Parts(_levels(_twos_k(blocks[..., 16:80])), _of_halves(blocks[..., :16].flatten(1)), header)


def _mxfp4(blocks: Tensor) -> Parts:
    if blocks[..., 0].max() > LARGEST_EXPONENT:
        raise ValueError(f"has scales above 2^{LARGEST_EXPONENT - 128}")
    # Levels are twice the numbers of E2M1, so the exponents of scales are one less.
    return Parts(_nibbles(blocks[..., 1:]), by_tile(blocks[..., 0].clamp(min=1) - 1))


_KINDS: Mapping[Type, tuple[Format, Callable[[Tensor], Parts]]] = {
    Type.Q4_0: (formats.Q4_0, _q4_0),
    Type.Q4_1: (formats.Q4_1, _q4_1),
    Type.Q5_0: (formats.Q5_0, _q5_0),
    Type.Q5_1: (formats.Q5_1, _q5_1),
    Type.Q8_0: (formats.Q8_0, _q8_0),
    Type.Q2_K: (formats.Q2_K, _q2_k),
    Type.Q3_K: (formats.Q3_K, _q3_k),
    Type.Q4_K: (formats.Q4_K, _q4_k),
    Type.Q5_K: (formats.Q5_K, _q5_k),
    Type.Q6_K: (formats.Q6_K, _q6_k),
    Type.IQ4_NL: (formats.IQ4_NL, _q4_0),
    Type.MXFP4: (formats.MXFP4, _mxfp4),
}
