"""Chooses the kernel that serves a file's quantised tensors on this processor.

Where our own code can run it serves all files: it holds scales as the files do, and 8 rows take little longer than one.
aten's kernels serve elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray
from torch import Tensor

from ssd_runtime.weights.gguf.blocks import groups8, levels4, levels8
from ssd_runtime.weights.kernels.int4 import Int4
from ssd_runtime.weights.kernels.int8 import Int8
from ssd_runtime.weights.kernels.kernel import Kernel
from ssd_runtime.weights.kernels.native import Native

Stored = tuple[NDArray[np.uint8], Type]
"""Blocks [out, bytes] and their type."""


def kernel4(stored: Sequence[Stored], bias: Tensor | None) -> Kernel:
    """The kernel of 4-bit tensors that share an input."""
    parts = [part for part in (levels4(data, kind) for data, kind in stored) if part is not None]
    levels = torch.cat([part.levels for part in parts])
    scale, zero = torch.cat([part.scale for part in parts]), torch.cat([part.zero for part in parts])
    if Native.can_serve(*levels.shape):
        return Native(levels, scale, zero, bias)
    return Int4(levels, scale, zero, bias)


def kernel8(stored: Sequence[Stored], bias: Tensor | None) -> Kernel:
    """The kernel of tensors that share an input, at 8 bits; types other than Q8_0 are requantised, and all for aten."""
    if Native.can_serve(sum(len(data) for data, _ in stored), _columns(*stored[0])):
        groups = [groups8(data, kind) for data, kind in stored]
        return Native(
            torch.cat([levels for levels, _ in groups]), torch.cat([scale for _, scale in groups]), None, bias
        )
    whole = [levels8(data, kind) for data, kind in stored]
    return Int8(torch.cat([levels for levels, _ in whole]), torch.cat([scale for _, scale in whole]), bias)


def _columns(data: NDArray[np.uint8], kind: Type) -> int:
    """Columns of the weight in blocks `data` [out, bytes]."""
    columns, size = GGML_QUANT_SIZES[kind]
    return int(data.shape[1]) // size * columns
