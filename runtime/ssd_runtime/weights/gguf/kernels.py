"""Chooses the kernel that serves a file's quantised tensors on this processor.

Where our own code can run it serves all files: it holds most types as the files do, and 8 rows take little longer than
one. aten's kernels serve elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray
from torch import Tensor

from ssd_runtime.weights.gguf.blocks import DENSE, levels4, levels8, requantised
from ssd_runtime.weights.gguf.index import GgufIndex
from ssd_runtime.weights.gguf.tiles import format_of, tiles_of
from ssd_runtime.weights.kernels.formats import Q8_0, Format, tiles8
from ssd_runtime.weights.kernels.int4 import Int4
from ssd_runtime.weights.kernels.int8 import Int8
from ssd_runtime.weights.kernels.kernel import Kernel
from ssd_runtime.weights.kernels.native import Native

Stored = tuple[NDArray[np.uint8], Type]
"""Blocks [out, bytes] and their type."""
FOUR, EIGHT = "4 bits", "8 bits"
"""Names of the forms that aten's kernels take."""


def form_of(data: NDArray[np.uint8], kind: Type) -> str | None:
    """The name of the form in which a tensor is served; tensors of one form can share a kernel. None for dense ones."""
    kept = _own_format(data, kind)
    if kept is not None:
        return kept.name
    if kind in DENSE:
        return None
    four = levels4(data[:1], kind)
    return FOUR if four is not None and Int4.can_serve(len(data), four.levels.shape[1]) else EIGHT


def held_bytes(index: GgufIndex) -> int:
    """Bytes of a file's tensors as they are held: those of types that are requantised take more than in the file."""
    per_number = Q8_0.bits / 8
    return sum(
        place.nbytes
        if place.type in DENSE or format_of(place.type) is not None
        else round(prod(place.shape) * per_number)
        for place in index.tensors.values()
    )


def is_kept(kind: Type, form: str) -> bool:
    """Whether a tensor of a file's type has the file's own levels in a form."""
    return form == kind.name or form == FOUR


def kernel_of(stored: Sequence[Stored], form: str, bias: Tensor | None) -> Kernel:
    """The kernel of tensors of one form that share an input."""
    if form == FOUR:
        parts = [part for part in (levels4(data, kind) for data, kind in stored) if part is not None]
        levels, scale, zero = (
            torch.cat([getattr(part, name) for part in parts]) for name in ("levels", "scale", "zero")
        )
        return Int4(levels, scale, zero, bias)
    if form == EIGHT:
        whole = [levels8(data, kind) for data, kind in stored]
        return Int8(torch.cat([levels for levels, _ in whole]), torch.cat([scale for _, scale in whole]), bias)
    kept = _own_format(*stored[0])
    assert kept is not None, "the form is one of our own"
    tiles = [tiles_of(*each) if is_kept(each[1], form) else tiles8(*requantised(*each)) for each in stored]
    return Native(kept, torch.cat(tiles), _columns(*stored[0]), bias)


def _own_format(data: NDArray[np.uint8], kind: Type) -> Format | None:
    """Our own format for a tensor: the file's, or Q8_0 for types without one; None if our code cannot serve it."""
    kept = format_of(kind) or (None if kind in DENSE else Q8_0)
    return kept if kept is not None and Native.can_serve(len(data), _columns(data, kind)) else None


def _columns(data: NDArray[np.uint8], kind: Type) -> int:
    """Columns of the weight in blocks `data` [out, bytes]."""
    columns, size = GGML_QUANT_SIZES[kind]
    return int(data.view(np.uint8).shape[1]) // size * columns
