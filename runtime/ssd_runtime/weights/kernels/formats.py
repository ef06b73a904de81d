"""The formats of weights that our own code multiplies by (`native/formats.h`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

GROUP = 32
"""Columns that share a scale, of weights and of rows."""
TILE = 16
"""Outputs whose blocks are stored together."""
HEADED = 8
"""Groups under a header."""


@dataclass(frozen=True, slots=True)
class Format:
    """A format: its number in C, the bits of a level's two planes, the bytes of a block's scales and of a header.

    The first plane has a level's high bits. A draft may read it without the second (`draft`, the number in C of that).
    """

    name: str
    number: int
    first: int
    second: int
    scales: int
    header: int = 0
    draft: int | None = None

    @property
    def has_levels(self) -> bool:
        """Whether a weight is quantised, so that rows are, too."""
        return self not in SIXTEEN.values()

    @property
    def bits(self) -> float:
        """Bits per weight, those of scales included."""
        return self.first + self.second + (self.scales + self.header / HEADED) / (2 * GROUP)

    @property
    def short(self) -> str:
        """The end of a kernel's name: its bits for the formats of light copies, whose tables of latency say so."""
        return {"Q4_1": "4", "Q8_0": "8"}.get(self.name, self.name)

    def tiles(self, levels: Tensor, scales: Tensor | None, header: Tensor | None = None) -> Tensor:
        """Pack a weight as [tiles, bytes]: a tile's first planes with scales, then its second planes.

        `levels` uint8 [out, in] are below 2^(first + second), `scales` are bytes [tiles, groups, scales] if blocks have
        any, and `header` bytes [tiles, groups / 8, header].
        """
        levels = whole_tiles(levels)
        out, columns = levels.shape
        apart = words_of(levels).view(out // TILE, TILE, columns // GROUP, GROUP // 4).permute(0, 2, 3, 1).contiguous()
        blocks = _plane(apart >> self.second, self.first)
        if scales is not None:
            blocks = torch.cat([blocks, scales], -1)
        if header is not None:
            blocks = torch.cat([header, blocks.unflatten(1, (-1, HEADED)).flatten(2)], -1)
        if not self.second:
            return blocks.flatten(1)
        return torch.cat([blocks.flatten(1), _plane(apart, self.second).flatten(1)], -1)

    def joined(self, tiles: Tensor, columns: int) -> Tensor:
        """The bytes of a weight of whole tiles: their first planes and scales, then their second planes."""
        if not self.second:
            return tiles.flatten()
        second = TILE * columns * self.second // 8
        return torch.cat([tiles[:, :-second].flatten(), tiles[:, -second:].flatten()])

    @property
    def draft_bits(self) -> float:
        """Bits per weight that a draft reads."""
        return self.bits - (self.second if self.draft is not None else 0)


Q4_0 = Format("Q4_0", 0, 4, 0, 32)
Q4_1 = Format("Q4_1", 1, 4, 0, 64)
Q5_0 = Format("Q5_0", 2, 4, 1, 32)
Q5_1 = Format("Q5_1", 3, 4, 1, 64)
Q8_0 = Format("Q8_0", 4, 4, 4, 32, draft=14)
Q2_K = Format("Q2_K", 5, 2, 0, 32, 64)
Q3_K = Format("Q3_K", 6, 2, 1, 32, 32)
Q4_K = Format("Q4_K", 7, 4, 0, 0, 256)
Q5_K = Format("Q5_K", 8, 4, 1, 0, 256)
Q6_K = Format("Q6_K", 9, 4, 2, 32, 32, draft=15)
IQ4_NL = Format("IQ4_NL", 10, 4, 0, 32)
MXFP4 = Format("MXFP4", 11, 4, 0, 16)
BF16 = Format("BF16", 12, 16, 0, 0)
F16 = Format("F16", 13, 16, 0, 0)
FORMATS = (Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, MXFP4, BF16, F16)
SIXTEEN = {torch.bfloat16: BF16, torch.float16: F16}
"""The formats of weights that are no levels but numbers, by these numbers' dtype."""
_ORDER = {BF16: (0, 2, 3, 1, 4), F16: (0, 2, 3, 4, 1)}
"""The order of tiles, outputs, groups, pairs of columns and columns of a pair in these formats, and back."""
_BACK = {BF16: (0, 3, 1, 2, 4), F16: (0, 4, 1, 2, 3)}


def whole_tiles(rows: Tensor) -> Tensor:
    """Rows [out, …] with zeros after them that complete the last tile."""
    missing = -len(rows) % TILE
    return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]) if missing else rows


def tiles8(levels: Tensor, scale: Tensor) -> Tensor:
    """Pack a weight levels × scale as tiles of `Q8_0`: levels int8 [out, in], scale [out, in / 32] rounded to fp16."""
    return Q8_0.tiles(levels.view(torch.uint8) ^ 128, halves(scale))


def tiles16(weight: Tensor) -> Tensor:
    """Pack a weight [out, in] in bf16 or fp16 as tiles [tiles, bytes] of its format in `SIXTEEN`."""
    parts = whole_tiles(weight).unflatten(0, (-1, TILE)).unflatten(2, (-1, GROUP // 2, 2))
    return parts.permute(_ORDER[SIXTEEN[weight.dtype]]).flatten(1).contiguous().view(torch.uint8)


def numbers16(tiles: Tensor, kept: Format) -> Tensor:
    """The weight [16 × tiles, in] that `tiles16` has packed."""
    dtype = next(dtype for dtype, each in SIXTEEN.items() if each is kept)
    sizes = {BF16: (-1, GROUP // 2, TILE, 2), F16: (-1, GROUP // 2, 2, TILE)}[kept]
    return tiles.view(dtype).unflatten(1, sizes).permute(_BACK[kept]).flatten(2).flatten(0, 1)


def words_of(numbers: Tensor) -> Tensor:
    """Bytes uint8 [..., 4n] as words int32 [..., n]: torch computes on four at once so."""
    # A slice of a single row is contiguous where it is, at whatever byte.
    return numbers.clone(memory_format=torch.contiguous_format).view(torch.int32)


def in_bytes(number: int) -> int:
    """The word of which each byte is a number below 128."""
    return 0x01010101 * number


def _plane(words: Tensor, bits: int) -> Tensor:
    """Pack the low `bits` bits of the bytes of words [tiles, groups, 8, 16] as bytes [tiles, groups, 64 × bits].

    8 / bits numbers share a byte.
    """
    shared = (words & in_bytes((1 << bits) - 1)).unflatten(2, (-1, 8 // bits))
    packed = shared[:, :, :, 0].clone()
    for place in range(1, 8 // bits):
        packed |= shared[:, :, :, place] << (bits * place)
    return packed.flatten(2).view(torch.uint8)


def by_tile(numbers: Tensor) -> Tensor:
    """Numbers [out, n] as [tiles, n, 16 outputs]."""
    return whole_tiles(numbers).unflatten(0, (-1, TILE)).transpose(1, 2).contiguous()


def halves(numbers: Tensor) -> Tensor:
    """Numbers [out, n] as the bytes [tiles, n, 32] of their fp16 forms."""
    return by_tile(numbers.to(torch.float16)).view(torch.uint8)
