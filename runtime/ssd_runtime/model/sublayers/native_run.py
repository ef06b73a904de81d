"""Many sub-layers in one call of our own code.

Between two calls Python takes some tens of microseconds, which is a fifth of a plain step of a model of 135M.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from ssd_runtime.model.batch.batch import Batch
from ssd_runtime.model.sublayers.native_attention import (
    NativeAttention,
    SegmentPlace,
    angles,
    described_rows,
    locate,
    longest_of,
)
from ssd_runtime.model.sublayers.native_mixing import ContinuedRows, NativeMixing, TreeStates, continues
from ssd_runtime.weights.kernels.kernel import Connection
from ssd_runtime.weights.kernels.native import required_library
from ssd_runtime.weights.kernels.native_ending import NativeEnding
from ssd_runtime.weights.kernels.native_mlp import NativeExperts, NativeMlp
from ssd_runtime.weights.native.library import COUNT, POINTER, fields


class _Sight(ctypes.Structure):
    _fields_ = (*fields(POINTER, "cos sin"), *fields(COUNT, "bytes width vectors longest"))


class _SubLayer(ctypes.Structure):
    _fields_ = (
        *fields(POINTER, "block segments sight"),
        *fields(POINTER, "gate_up down activation experts mixing continuations"),
        *fields(COUNT, "continued"),
        *fields(POINTER, "ending inputs"),
        *fields(COUNT, "input_bytes"),
        *fields(POINTER, "connection"),
    )


class NativeSubLayer:
    """A sub-layer that our own code serves as a whole: an attention block, another mixer, an MLP or experts.

    The ending of a layer is one by itself.
    """

    def __init__(
        self,
        layer: int,
        kind: int,
        block: NativeAttention | NativeMixing | NativeMlp | NativeExperts | NativeEnding,
        connection: Connection | None = None,
        beside: NativeMixing | None = None,
    ) -> None:
        """`layer` has the keys that attention reads. `connection` is that of an MLP or of experts; attention and the
        mixer `beside` it have their own."""
        self.layer, self.kind = layer, kind
        self.attention = block if isinstance(block, NativeAttention) else None
        self.mixing = block if isinstance(block, NativeMixing) else beside
        self.ending = block if isinstance(block, NativeEnding) else None
        self.rowwise = block if isinstance(block, NativeMlp | NativeExperts | NativeEnding) else None
        """The block if it computes each row alone: an MLP, experts or an ending."""
        self.connection = block.connection if isinstance(block, NativeAttention | NativeMixing) else connection
        self.about = _SubLayer()
        """The sub-layer as `run` in `sublayers.c` takes it, but for its keys or states, which each call adds."""
        if isinstance(block, NativeMlp):
            self.about.gate_up, self.about.down = block.gate_up.address, block.down.address
            self.about.activation = ctypes.addressof(block.activation)
        elif isinstance(block, NativeExperts):
            self.about.experts = block.address
        elif isinstance(block, NativeEnding):
            self.about.ending = block.address
        elif isinstance(block, NativeAttention):
            self.about.block = block.address
        self.about.mixing = None if self.mixing is None else self.mixing.address
        self.about.connection = None if self.connection is None else self.connection.address


class NativeRun:
    """Sub-layers that our own code runs one after the other; made once, because plain steps all run the same ones.

    Calls must not overlap: each writes where this step's keys, values and states are.
    """

    def __init__(self, parts: Sequence[NativeSubLayer]) -> None:
        self._parts = tuple(parts)  # the structures are theirs
        self._steps = (_SubLayer * len(parts))(*(part.about for part in parts))
        self._attentions = [
            (step, part.layer, part.kind)
            for step, part in zip(self._steps, parts, strict=True)
            if part.attention is not None
        ]
        self._mixings = [
            (step, part.layer, part.mixing)
            for step, part in zip(self._steps, parts, strict=True)
            if part.mixing is not None
        ]
        self._injections = [
            (step, part.layer, part.ending.width)
            for step, part in zip(self._steps, parts, strict=True)
            if part.ending is not None and part.ending.width
        ]
        # Layers are mostly of one size, so that few need be asked how much memory they take.
        blocks = {
            (part.kind, part.attention.sizes): (part.kind, part.attention)
            for part in parts
            if part.attention is not None
        }
        self._blocks = tuple(blocks.values())
        rowwise = {(type(block), block.sizes): block for part in parts if (block := part.rowwise) is not None}
        self._rowwise = tuple(rowwise.values())
        self._sights = {kind: _Sight() for kind, _ in self._blocks}
        for step, _, kind in self._attentions:
            step.sight = ctypes.addressof(self._sights[kind])
        self._mixing_floats = max((mixing.row_floats for _, _, mixing in self._mixings), default=0)

    def serves(self, batch: Batch) -> bool:
        """Whether our own code runs these rows: those of searches it does not run after states."""
        return not self._mixings or (batch.sequences is not None and continues(batch.sequences))

    def __call__(self, x: Tensor, batch: Batch, inputs: Tensor | None = None) -> Tensor:
        """The sub-layers on `x` [rows, hidden]; writes keys and values into the sequences' caches.

        `inputs` [layers, rows, width] are those of layers that receive some (`LayerInputs`). Raises
        RuntimeError if sizes do not agree.
        """
        found, sequences = required_library(), batch.sequences
        assert sequences is not None
        x = x.contiguous()
        n, threads = x.shape[0], torch.get_num_threads()
        longest = {kind: longest_of(sequences, kind) for kind in self._sights}
        described = {kind: [described_rows(segment, kind) for segment in sequences] for kind in longest}
        for kind, sight in self._sights.items():
            sight.cos, sight.sin, sight.bytes, sight.width, sight.vectors = angles(batch.rotations[kind])
            sight.longest = longest[kind]
        places = (SegmentPlace * (len(self._attentions) * len(sequences)))()
        first, each, at = ctypes.addressof(places), ctypes.sizeof(SegmentPlace), 0
        for step, layer, kind in self._attentions:
            step.segments = first + at * each
            for segment, rows in zip(sequences, described[kind], strict=True):
                places[at] = rows
                locate(places[at], segment, kind, layer)
                at += 1
        continued, trees = list[ContinuedRows](), TreeStates()
        for step, layer, mixing in self._mixings:
            continued.append(of_layer := mixing.continued(layer, sequences, trees))
            step.continuations, step.continued = of_layer.address, len(of_layer.places)
        for step, layer, width in self._injections:
            assert inputs is not None, "a layer with an injection has inputs"
            step.input_bytes = n * width * inputs.itemsize
            step.inputs = inputs[layer].data_ptr()
        size = max((block.floats(n, longest[kind], threads) for kind, block in self._blocks), default=0)
        size = 2 * x.numel() + max(size, n * self._mixing_floats, *(block.floats(n) for block in self._rowwise), 0)
        y = found.write(
            torch.empty_like(x),
            size,
            found.run,
            ctypes.addressof(self._steps),
            len(self._steps),
            len(sequences),
            x.data_ptr(),
            x.nbytes,
            n,
        )
        for of_layer in continued:
            of_layer.keep()
        return y
