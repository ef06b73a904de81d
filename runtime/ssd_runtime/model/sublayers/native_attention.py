"""Attention blocks that run in one call of our own code (`weights/native/sublayers.c`)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from ssd_runtime.model.batch.batch import Segment
from ssd_runtime.model.batch.rotary import Rotation
from ssd_runtime.model.family.family import Family
from ssd_runtime.model.layer.layer import Layer
from ssd_runtime.weights.kernels.formats import TILE
from ssd_runtime.weights.kernels.kernel import Connection, RmsNorm
from ssd_runtime.weights.kernels.native import Native, required_library
from ssd_runtime.weights.native.library import COUNT, FLOAT, POINTER, fields

QUERIES = 32
"""Most queries of a key-value head that are attended together."""
HEAD_DIMS = (16, 32, 64, 80, 96, 128, 256, 512)
"""Sizes of heads for which the code is compiled."""


class SegmentPlace(ctypes.Structure):
    """`Segment` in `weights/native/attention.h`."""

    _fields_ = (
        *fields(POINTER, "keys values"),
        *fields(COUNT, "bytes room stride rows slots own"),
        *fields(POINTER, "bias"),
        *fields(COUNT, "bias_stride bias_bytes"),
    )


class _Block(ctypes.Structure):
    _fields_ = (
        *fields(POINTER, "qkv output q_norm k_norm v_norm sinks"),
        *fields(COUNT, "sink_bytes"),
        *fields(FLOAT, "scale cap"),
        *fields(COUNT, "projections heads kv_heads head_dim made gated norms_last alternate kv_bits"),
    )


class NativeAttention:
    """W_output attention(W_qkv x), with RMS norms of queries and keys, and gates of its output, if the model has them.

    A row's result depends on the row and on the keys that it sees alone: not on other rows, nor on hidden keys or the
    slots that keys are in, as long as their order is the same.
    """

    @classmethod
    def of(
        cls, layer: Layer, family: Family, heads: int, kv_bits: int, cap: float | None = None
    ) -> NativeAttention | None:
        """The attention block of a layer, with a soft-cap of scores; None where the code does not serve it."""
        about = layer.about
        qkv, output = layer.qkv.natives, layer.output.fused
        norms, connection = (
            {"q_norm": layer.q_norm, "k_norm": layer.k_norm, "v_norm": layer.v_norm},
            layer.attention_connection,
        )
        if (
            layer.mixer is not None
            or not qkv
            or len({each.rounding for each in qkv}) > 1  # all multiply the same rows
            or output is None
            or connection is None
            or about.head_dim not in HEAD_DIMS
            or any(norm is not None and norm.rms is None for norm in norms.values())
        ):
            return None
        return cls(
            qkv=qkv,
            output=output,
            connection=connection,
            **{name: None if norm is None else norm.rms for name, norm in norms.items()},
            heads=heads,
            kv_heads=about.kv_heads,
            head_dim=about.head_dim,
            made=0 if about.shares else 1 if layer.keys_are_values else 2,
            scale=layer.scale,
            cap=cap or 0.0,
            gated=family.gated,
            norms_last=family.qk_norm == "rotated",
            alternate=family.pairs_alternate,
            kv_bits=kv_bits,
            sinks=None if layer.sinks is None else layer.sinks.tensor,
        )

    def __init__(
        self,
        qkv: Sequence[Native],
        output: Native,
        connection: Connection | None,
        q_norm: RmsNorm | None,
        k_norm: RmsNorm | None,
        v_norm: RmsNorm | None = None,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        scale: float,
        made: int = 2,
        cap: float = 0.0,
        gated: bool = False,
        norms_last: bool = False,
        alternate: bool = False,
        kv_bits: int = 32,
        sinks: Tensor | None = None,
    ) -> None:
        """The outputs of `qkv` together are queries, keys and values, which caches hold in `kv_bits` bits a number.

        Of keys and values they have what is `made`: 2, both; 1, keys, which are values before their norm and rotation;
        or 0, where another layer's are read. The norms are those of each head, or of all heads together for queries
        and keys, and come after the rotation if `norms_last`. If `gated`, every query is followed by the gates of
        its head's output, before their sigmoid. A `cap` of 0 is none. Rotations turn neighbours if `alternate`
        (`rotate`). `sinks` [heads] are as for `attend`.
        """
        self._library = required_library()
        self.connection = connection
        norms = q_norm, k_norm, v_norm
        addresses = (ctypes.c_void_p * len(qkv))(*(each.address for each in qkv))
        sinks = None if sinks is None else sinks.float().contiguous()
        self._parts = tuple(qkv), addresses, output, norms, sinks  # what the structure points to
        projections = ctypes.addressof(addresses)
        sizes = len(qkv), heads, kv_heads, head_dim, made, int(gated), int(norms_last), int(alternate), kv_bits
        norm_addresses = [None if each is None else each.address for each in norms]
        sink_place = (None, 0) if sinks is None else (sinks.data_ptr(), sinks.nbytes)
        self._block = _Block(projections, output.address, *norm_addresses, *sink_place, scale, cap, *sizes)
        self.address = ctypes.addressof(self._block)
        self._group = heads // kv_heads
        self._per_row = ((2 + gated) * heads + made * kv_heads) * head_dim
        self._per_row += qkv[0].row_floats + output.row_floats

    @property
    def sizes(self) -> tuple[int, int]:
        """Floats per row, and queries per key-value head; blocks with equal ones take equal memory (`floats`)."""
        return self._per_row, self._group

    def floats(self, n: int, longest: int, threads: int) -> int:
        """The numbers of memory that a call takes for `n` rows, with scores of `longest` numbers."""
        return n * self._per_row + threads * 2 * min(QUERIES, n * self._group) * longest

    def __call__(
        self, layer: int, kind: int, x: Tensor, segments: Sequence[Segment], rotation: Rotation | None
    ) -> Tensor:
        """The block on `x` [rows, hidden] in layer `layer` of kind `kind`; writes keys and values into the caches.

        Raises RuntimeError if sizes do not agree.
        """
        x = x.contiguous()
        n = x.shape[0]
        given = (SegmentPlace * len(segments))(*(described_rows(segment, kind) for segment in segments))
        for segment, place in zip(segments, given, strict=True):
            locate(place, segment, kind, layer)
        longest = longest_of(segments, kind)
        return self._library.write(
            torch.empty_like(x),
            self.floats(n, longest, torch.get_num_threads()),
            self._library.attention,
            self.address,
            None if self.connection is None else self.connection.address,
            ctypes.addressof(given),
            len(given),
            *angles(rotation),
            x.data_ptr(),
            x.nbytes,
            n,
            longest,
        )


def described_rows(segment: Segment, kind: int) -> SegmentPlace:
    """The rows of a segment and what they see in layers of a kind, without the place of keys and values."""
    place, view = SegmentPlace(), segment.views[kind]
    assert isinstance(segment.slot, int)
    place.rows = segment.rows
    place.slots = view.end - view.begin
    place.own = segment.slot - view.begin
    if (bias := view.bias) is not None:
        place.bias, place.bias_stride, place.bias_bytes = bias.data_ptr(), bias.stride(0), bias.nbytes
    return place


def locate(place: SegmentPlace, segment: Segment, kind: int, layer: int) -> None:
    """Write where a layer of a kind has the keys and values that a segment sees."""
    at = segment.cache.address(layer, segment.views[kind].begin)
    place.keys, place.values, place.bytes, place.room, place.stride = at


def longest_of(segments: Sequence[Segment], kind: int) -> int:
    """The length of the scores of a query in layers of a kind."""
    return max(segment.views[kind].end - segment.views[kind].begin for segment in segments) + TILE


def angles(rotation: Rotation | None) -> tuple[int | None, int | None, int, int, int]:
    """A rotation as `Rotation` in `weights/native/attention.h` is."""
    if rotation is None:
        return None, None, 0, 0, 0
    cos, sin = rotation
    return cos.data_ptr(), sin.data_ptr(), cos.nbytes, cos.shape[-1], cos.shape[1]
