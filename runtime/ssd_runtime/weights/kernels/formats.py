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

    def nbytes(self, out: int, columns: int) -> int:
        """Bytes of a weight [out, columns], whose last tile is whole."""
        return round(-(-out // TILE) * TILE * columns * self.bits) // 8

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
_BACK = {BF16: (0, 3, 1, 2, 4), F16: (0, 4, 1, 2, 3)}


def whole_tiles(rows: Tensor) -> Tensor:
    """Rows [out, …] with zeros after them that complete the last tile."""
    missing = -len(rows) % TILE
    return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]) if missing else rows


def numbers16(tiles: Tensor, kept: Format) -> Tensor:
    """The weight [16 × tiles, in] of tiles [tiles, bytes] in bf16 or fp16."""
    dtype = next(dtype for dtype, each in SIXTEEN.items() if each is kept)
    sizes = {BF16: (-1, GROUP // 2, TILE, 2), F16: (-1, GROUP // 2, 2, TILE)}[kept]
    return tiles.view(dtype).unflatten(1, sizes).permute(_BACK[kept]).flatten(2).flatten(0, 1)
