"""Chooses the kernel that serves a file's quantised tensors on this processor.

Where our own code can run it serves all files: it holds most types as the files do, and 8 rows take little longer than
one. aten's kernels serve elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray
from torch import Tensor

from ssd_runtime.weights.gguf.blocks import DENSE, LEVELS4, dense_parts, levels4
from ssd_runtime.weights.gguf.index import GgufIndex
from ssd_runtime.weights.kernels.formats import FORMATS, Q8_0, TILE
from ssd_runtime.weights.kernels.huge_pages import HugePages
from ssd_runtime.weights.kernels.int4 import Int4
from ssd_runtime.weights.kernels.int8 import Int8, quantised
from ssd_runtime.weights.kernels.kernel import Kernel
from ssd_runtime.weights.kernels.native import Native, rounded

Stored = tuple[NDArray[np.uint8], Type]
"""Blocks [out, bytes] and their type."""
FOUR, EIGHT = "4 bits", "8 bits"
"""Names of the forms that aten's kernels take."""
OWN = {kept.name: kept for kept in FORMATS}
"""Our own formats by the names of their forms."""
BITS: dict[str | None, float] = {**{name: kept.bits for name, kept in OWN.items()}, FOUR: 5.0, EIGHT: 8.0, None: 32.0}
"""Bits that a number takes in each form; None is for dense tensors."""

LARGEST_EXPONENT = 200
"""Largest exponent of MXFP4 that is served; it is 2^72, far above any model's."""


def form_of(shape: Sequence[int], kind: Type, is_last: bool = True) -> str | None:
    """The name of the form in which a tensor [..., out, in] is served; None for dense ones.

    Tensors of one form can share a kernel, of which only the last may end within a tile.
    """
    rows, columns = (1, *shape)[-2:]
    kept = OWN.get(kind.name) or (None if kind in DENSE else Q8_0)
    if kept is not None and (is_last or rows % TILE == 0) and Native.can_serve(columns):
        return kept.name
    if kind in DENSE:
        return None
    return FOUR if kind in LEVELS4 and Int4.can_serve(rows, columns) else EIGHT


def held_bytes(index: GgufIndex) -> int:
    """Bytes of a file's tensors as they are held here, each in its form; dense ones are held in fp32."""
    places = index.tensors.values()
    return sum(round(prod(each.shape) * BITS[form_of(each.shape, each.type)] / 8) for each in places)


def is_kept(kind: Type, form: str) -> bool:
    """Whether a tensor of a file's type has the file's own levels in a form."""
    return form == kind.name or form == FOUR


def kernel_of(stored: Sequence[Stored], form: str, bias: Tensor | None, memory: HugePages | None = None) -> Kernel:
    """The kernel of tensors of one form that share an input; `memory` is for our own.

    Raises ValueError for scales that no model has.
    """
    if form == FOUR:
        fours = [levels4(*each) for each in stored]
        levels, scale, zero = (torch.cat(parts) for parts in zip(*fours, strict=True))
        return Int4(levels, scale, zero, bias)
    if form == EIGHT:
        eights = [quantised(rows) for each in stored for rows in dense_parts(*each)]
        levels, scale = (torch.cat(parts) for parts in zip(*eights, strict=True))
        return Int8(levels, scale, bias)
    return Native.of_blocks(OWN[form], [_blocks(*each, form) for each in stored], _columns(*stored[0]), bias, memory)


def _blocks(data: NDArray[Any], kind: Type, form: str) -> NDArray[Any]:
    """The blocks or numbers `data` [out, bytes], or such of 8 bits if the form is another."""
    if kind == Type.MXFP4 and data.reshape(len(data), -1, GGML_QUANT_SIZES[kind][1])[..., 0].max() > LARGEST_EXPONENT:
        raise ValueError(f"has scales above 2^{LARGEST_EXPONENT - 128}")
    if is_kept(kind, form):
        return data
    return np.concatenate([rounded(rows, 8).blocks for rows in dense_parts(data, kind)])


def _columns(data: NDArray[np.uint8], kind: Type) -> int:
    """Columns of the weight in blocks `data` [out, bytes]."""
    columns, size = GGML_QUANT_SIZES[kind]
    return int(data.view(np.uint8).shape[1]) // size * columns
