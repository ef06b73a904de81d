"""Many sub-layers in one call of our own code.

Between two calls Python takes some tens of microseconds, which is a fifth of a plain step of a model of 135M.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from ssd_runtime.model.batch import Batch
from ssd_runtime.model.native.native_attention import (
    NativeAttention,
    SegmentPlace,
    angles,
    described_rows,
    locate,
    longest_of,
)
from ssd_runtime.weights.kernels.kernel import RmsNorm
from ssd_runtime.weights.kernels.native import Native, mlp_floats
from ssd_runtime.weights.native.library import floats, library


class _SubLayer(ctypes.Structure):
    _fields_ = (
        ("block", ctypes.c_void_p),
        ("segments", ctypes.c_void_p),
        ("cos", ctypes.c_void_p),
        ("sin", ctypes.c_void_p),
        ("angle_bytes", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("stride", ctypes.c_int64),
        ("longest", ctypes.c_int64),
        ("gate_up", ctypes.c_void_p),
        ("down", ctypes.c_void_p),
        ("norm", ctypes.c_void_p),
    )


class NativeSubLayer:
    """A sub-layer that our own code serves as a whole: an attention block, or an MLP."""

    __slots__ = ("about", "attention", "kind", "layer", "mlp", "norm")

    def __init__(
        self,
        layer: int,
        kind: int,
        attention: NativeAttention | None = None,
        mlp: tuple[Native, Native] | None = None,
        norm: RmsNorm | None = None,
    ) -> None:
        """`mlp` has the kernels of gate and up, and of down, and `norm` is that of its input."""
        self.layer, self.kind, self.attention, self.mlp = layer, kind, attention, mlp
        self.norm = norm
        self.about = _SubLayer()
        """The sub-layer as `run` in `sublayers.c` takes it, but for its keys and values, which each call adds."""
        if attention is not None:
            self.about.block = attention.address
        if mlp is not None:
            self.about.gate_up, self.about.down = (kernel.address for kernel in mlp)
            self.about.norm = None if norm is None else norm.address


def run_natively(parts: Sequence[NativeSubLayer], x: Tensor, batch: Batch) -> Tensor:
    """The sub-layers on `x` [rows, hidden], one after the other; writes keys and values into the sequences' caches.

    Raises RuntimeError if sizes do not agree.
    """
    found, sequences = library(), batch.sequences
    assert found is not None
    assert sequences is not None
    x = x.contiguous()
    n, threads = x.shape[0], torch.get_num_threads()
    steps = (_SubLayer * len(parts))(*(part.about for part in parts))
    attentions = [(step, part) for step, part in zip(steps, parts, strict=True) if part.attention is not None]
    kinds = {part.kind for _, part in attentions}
    seen = {kind: (longest_of(sequences, kind), angles(batch.rotations[kind])) for kind in kinds}
    described = {kind: [described_rows(segment, kind) for segment in sequences] for kind in kinds}
    places = (SegmentPlace * (len(attentions) * len(sequences)))()
    size, at = 0, 0
    for step, part in attentions:
        step.segments = ctypes.addressof(places) + at * ctypes.sizeof(SegmentPlace)
        for segment, rows in zip(sequences, described[part.kind], strict=True):
            places[at] = rows
            locate(places[at], segment, part.kind, part.layer)
            at += 1
        step.longest, (step.cos, step.sin, step.angle_bytes, step.width, step.stride) = seen[part.kind]
        assert part.attention is not None
        size = max(size, part.attention.floats(n, step.longest, threads))
    size = x.numel() + max(size, *(mlp_floats(n, *part.mlp) for part in parts if part.mlp is not None), 0)
    y, memory = torch.empty_like(x), floats(size)
    code = found.run(
        ctypes.addressof(steps),
        len(steps),
        len(sequences),
        x.data_ptr(),
        x.nbytes,
        n,
        y.data_ptr(),
        memory.data_ptr(),
        size,
        threads,
    )
    if code:
        raise found.refusal(code)
    return y
