"""Attention blocks that run in one call of our own code (`weights/native/sublayers.c`)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from ssd_runtime.model.batch import Segment
from ssd_runtime.model.rotary import Rotation
from ssd_runtime.weights.kernels.kernel import RmsNorm
from ssd_runtime.weights.kernels.native import TILE, Native, quantised_floats
from ssd_runtime.weights.native.library import floats, library

QUERIES = 32
"""Most queries of a key-value head that are attended together."""
HEAD_DIMS = (16, 32, 64, 80, 96, 128, 256)
"""Sizes of heads for which the code is compiled."""


class _Segment(ctypes.Structure):
    _fields_ = (
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("slots", ctypes.c_int64),
        ("own", ctypes.c_int64),
        ("bias", ctypes.c_void_p),
    )


class _Block(ctypes.Structure):
    _fields_ = (
        ("qkv", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("norm", ctypes.c_void_p),
        ("q_norm", ctypes.c_void_p),
        ("k_norm", ctypes.c_void_p),
        ("epsilon", ctypes.c_float),
        ("q_epsilon", ctypes.c_float),
        ("k_epsilon", ctypes.c_float),
        ("scale", ctypes.c_float),
        ("projections", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
    )


class NativeAttention:
    """x + W_output attention(W_qkv norm(x)), with RMS norms of queries and keys per head if the model has them.

    A row's result depends on the row and on the keys that it sees alone: not on other rows, nor on hidden keys or the
    slots that keys are in, as long as their order is the same.
    """

    def __init__(
        self,
        qkv: Sequence[Native],
        output: Native,
        norm: RmsNorm | None,
        q_norm: RmsNorm | None,
        k_norm: RmsNorm | None,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        scale: float,
    ) -> None:
        """The outputs of `qkv` together are queries, keys and values.

        `norm` is that of the block's input, the others are those of each head.
        """
        found = library()
        if found is None:
            raise RuntimeError("no compiled code for this processor")
        self._library = found
        norms = norm, q_norm, k_norm
        addresses = (ctypes.c_void_p * len(qkv))(*(each.address for each in qkv))
        self._parts = tuple(qkv), addresses, output, norms  # what the structure points to
        weights = [None if each is None else each.weight.data_ptr() for each in norms]
        epsilons = [0.0 if each is None else each.epsilon for each in norms]
        projections = ctypes.addressof(addresses)
        sizes = len(qkv), heads, kv_heads, head_dim
        self._block = _Block(projections, output.address, *weights, *epsilons, scale, *sizes)
        self._address = ctypes.addressof(self._block)
        self._group = heads // kv_heads
        self._per_row = (2 * heads + 2 * kv_heads) * head_dim
        self._per_row += quantised_floats(1, qkv[0].in_features) + quantised_floats(1, heads * head_dim)

    def __call__(
        self, layer: int, kind: int, x: Tensor, segments: Sequence[Segment], rotation: Rotation | None
    ) -> Tensor:
        """The block on `x` [rows, hidden] in layer `layer` of kind `kind`; writes keys and values into the caches."""
        x = x.contiguous()
        n = x.shape[0]
        y = torch.empty_like(x)
        longest = 0
        given = (_Segment * len(segments))()
        for segment, place in zip(segments, given, strict=True):
            view = segment.views[kind]
            slots = view.end - view.begin
            longest = max(longest, slots + TILE)
            place.keys, place.values, place.stride = segment.cache.address(layer, view.begin)
            place.rows = segment.rows
            place.slots = slots
            place.own = segment.slot - view.begin
            place.bias = None if view.bias is None else view.bias.data_ptr()
        threads = torch.get_num_threads()
        queries = min(QUERIES, n * self._group)
        memory = floats(n * self._per_row + threads * 2 * queries * longest)
        cos, sin = (None, None) if rotation is None else rotation
        self._library.attention(
            self._address,
            ctypes.addressof(given),
            None if cos is None else cos.data_ptr(),
            None if sin is None else sin.data_ptr(),
            0 if cos is None else cos.shape[-1],
            0 if cos is None else cos.stride(0),
            x.data_ptr(),
            n,
            longest,
            y.data_ptr(),
            memory.data_ptr(),
            threads,
        )
        return y
