"""Our own product of fp32 rows with weights of 2 to 16 bits, in C (`native/project.h`)."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Sequence
from copy import copy
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ssd_runtime.weights.kernels.formats import GROUP, Q4_1, Q8_0, SIXTEEN, TILE, Format, numbers16, whole_tiles
from ssd_runtime.weights.kernels.huge_pages import HugePages
from ssd_runtime.weights.kernels.kernel import RmsNorm
from ssd_runtime.weights.native.library import COUNT, POINTER, Library, fields, floats, library


class _Weight(ctypes.Structure):
    _fields_ = (
        *fields(COUNT, "format out_features in_features own_threads bytes bias_bytes"),
        *fields(POINTER, "blocks bias chosen"),
        *fields(COUNT, "number padding"),
    )


class Native:
    """A weight in one of our own formats.

    Rows are quantised to 8 bits per group of 32 columns, unless the weight has 16 bits. A row's product is the same to
    the bit whatever rows stand beside it.
    """

    def __init__(
        self, kept: Format, tiles: Tensor, columns: int, bias: Tensor | None = None, out: int | None = None
    ) -> None:
        """`tiles` uint8 [bytes] are those of a weight [out, columns] (`native/formats.h`).

        They have 16 outputs each, of which `out` are the weight's; by default all. Raises RuntimeError where the code
        cannot run.
        """
        self.library = required_library()
        self._kept = kept
        self.rounding = torch.int8 if kept.has_levels else torch.float32
        self._draft: Native | None = None
        self._nested = False
        self._chosen: Tensor | None = None
        self.name = f"{self.library.instructions}{kept.short}"
        whole = len(tiles) // kept.nbytes(TILE, columns) * TILE
        self.out_features, self.in_features = whole if out is None else out, columns
        self._blocks = tiles
        padded = None if bias is None else whole_tiles(bias.float()).contiguous()
        self.bias = None if padded is None else padded[: self.out_features]
        self._about = _Weight(
            kept.number,
            whole,
            self.in_features,
            0,
            tiles.nbytes,
            0 if padded is None else padded.nbytes,
            tiles.data_ptr(),
            None if padded is None else padded.data_ptr(),
            padding=whole - self.out_features,
        )
        self.address = ctypes.addressof(self._about)
        self.moved = False

    @classmethod
    def of_blocks(
        cls,
        kept: Format,
        parts: Sequence[NDArray[Any]],
        columns: int,
        bias: Tensor | None = None,
        memory: HugePages | None = None,
    ) -> Native:
        """A weight of parts [out, bytes], one below the other, which are blocks or numbers as in a `.gguf` file.

        Only the last may end within a tile. With `memory` it lies there.
        """
        size = kept.nbytes(sum(map(len, parts)), columns)
        tiles = torch.empty(size, dtype=torch.uint8) if memory is None else memory.take(size)
        begin = 0
        for part in parts:
            required_library().repack(kept.number, part, columns, tiles, begin)
            begin += len(part) // TILE
        found = cls(kept, tiles, columns, bias, sum(map(len, parts)))
        found.moved = memory is not None
        return found

    def move(self, memory: HugePages) -> None:
        """Keep the packed weight in `memory` from now on; no call may be running."""
        self._blocks = memory.take(self.nbytes).copy_(self._blocks)
        self._about.blocks = self._blocks.data_ptr()
        self.moved = True
        self._draft = None

    @property
    def draft(self) -> Native | None:
        """The kernel on the same memory that reads the high bits alone; None for formats without such a draft."""
        if self._kept.draft is None:
            return None
        if self._draft is None:
            self._draft = self._sharing()
            self._draft.name = f"{self.name}/4"
            self._draft._about.format = self._kept.draft
        return self._draft

    def among(self, tiles: Tensor) -> Native:
        """The kernel on the same memory for the outputs of these tiles [n] alone; others are minus infinity."""
        found = self._sharing()
        found._chosen = tiles.to(torch.int32).contiguous()
        found._about.chosen = found._chosen.data_ptr()
        found._about.number = len(tiles)
        return found

    def _sharing(self) -> Native:
        """Another kernel on the same memory."""
        other = copy(self)
        other._draft = None
        other._about = _Weight.from_buffer_copy(self._about)
        other.address = ctypes.addressof(other._about)
        other._nested = other.moved = True
        return other

    @property
    def draft_bytes(self) -> int:
        """Bytes that a product of a draft reads: all of them where there is no `draft`."""
        return int(self.nbytes * self._kept.draft_bits / self._kept.bits)

    @classmethod
    def of16(cls, weight: Tensor, bias: Tensor | None = None) -> Native:
        """A weight [out, in] in bf16 or fp16, every number of which is kept."""
        numbers = weight.detach().contiguous().view(torch.uint8).numpy()
        return cls.of_blocks(SIXTEEN[weight.dtype], [numbers], weight.shape[1], bias)

    @property
    def has_numbers(self) -> bool:
        """Whether the weight is in bf16 or fp16, and not quantised."""
        return not self._kept.has_levels

    @property
    def numbers(self) -> Tensor:
        """The weight [out, in] in bf16 or fp16, of a kernel that `has_numbers`."""
        return numbers16(self._blocks.view(self._about.out_features // TILE, -1), self._kept)[: self.out_features]

    @property
    def row_floats(self) -> int:
        """The number of floats that a row takes in the order in which its product reads it."""
        width = self.in_features
        return width // 4 + 7 * (width // GROUP) if self._kept.has_levels else width

    @staticmethod
    def can_serve(in_features: int) -> bool:
        """Whether a weight of so many columns can be packed and multiplied on this machine."""
        return in_features % GROUP == 0 and library() is not None

    @property
    def own_threads(self) -> bool:
        """Whether it runs on threads of our own (`native/pool.h`) instead of torch's.

        Our own wait for no thread that has lost its processor. But torch's spin for some milliseconds after their work,
        on the same processors. So where torch multiplies between our calls, its threads should serve ours too.
        """
        return bool(self._about.own_threads)

    @own_threads.setter
    def own_threads(self, own: bool) -> None:
        self._about.own_threads = int(own)
        if self._draft is not None:
            self._draft.own_threads = own

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the packed weight takes: none for a `draft`."""
        return 0 if self._nested else self._blocks.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """The product [n, out] of rows `x` [n, in]."""
        return self.fused(x.float(), None, None).to(x.dtype)

    def fused(self, x: Tensor, norm: RmsNorm | None, residual: Tensor | None, cap: float | None = None) -> Tensor:
        """W norm(x) + residual, [n, out] in fp32, of fp32 rows `x` [n, in]; or `capped`, without a residual.

        Raises RuntimeError if sizes do not agree.
        """
        x = x.contiguous()
        n = x.shape[0]
        y = floats(n, self._about.out_features)
        if self._chosen is not None:
            y.numpy().fill(-math.inf)  # by this thread: torch's others would take turns with ours
        is_whole = not self._about.padding
        added = residual.contiguous() if residual is not None and is_whole else None
        y = self.library.write(
            y,
            n * self.row_floats,
            self.library.linear,
            self.address,
            None if norm is None else norm.address,
            x.data_ptr(),
            x.nbytes,
            n,
            None if added is None else added.data_ptr(),
            0 if added is None else added.nbytes,
            cap or 0.0,
        )
        if is_whole:
            return y
        y = y[:, : self.out_features]
        return y if residual is None else y + residual


def use_huge_pages(kernels: Iterable[Native]) -> None:
    """Move the weights of kernels that were not moved yet into huge pages; no call may be running on them."""
    memory = HugePages()
    for kernel in kernels:
        if not kernel.moved:
            kernel.move(memory)


def required_library() -> Library:
    """The C code. Raises RuntimeError where it cannot run."""
    found = library()
    if found is None:
        raise RuntimeError("no compiled code for this processor")
    return found


class Rounded(NamedTuple):
    """A weight in 4 or 8 bits: blocks [out, bytes] of `kept`, the squared error of 4 bits, and the sum of squares."""

    kept: Format
    blocks: NDArray[np.uint8]
    error: float
    squares: float


def rounded(weight: Tensor, bits: int) -> Rounded:
    """Round a weight [out, in] to 4 or 8 bits, with scales in fp16 (`native/round.h`).

    For 4 bits each group of columns takes the range, of several shares of its own, whose levels are nearest to it.
    Raises RuntimeError where the code cannot run.
    """
    kept = {4: Q4_1, 8: Q8_0}[bits]
    if weight.dtype not in (torch.float32, *SIXTEEN):  # such as fp64
        weight = weight.float()
    blocks = np.empty((len(weight), round(weight.shape[1] * kept.bits) // 8), np.uint8)
    return Rounded(kept, blocks, *required_library().round(weight, bits, blocks))
