"""Our own product of fp32 rows with 4- and 8-bit weights, in C (`native/products.h`)."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ssd_runtime.weights.kernels.kernel import RmsNorm
from ssd_runtime.weights.native.library import floats, library

GROUP = 32
"""Columns that share a scale, of weights and of rows."""
SMALLEST_SCALE = 2.0**-24
"""The smallest positive number of fp16."""
TILE = 16
"""Outputs whose blocks are stored together."""


class _Weight(ctypes.Structure):
    _fields_ = (
        ("bits", ctypes.c_int64),
        ("out_features", ctypes.c_int64),
        ("in_features", ctypes.c_int64),
        ("own_threads", ctypes.c_int64),
        ("bytes", ctypes.c_int64),
        ("bias_bytes", ctypes.c_int64),
        ("blocks", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
    )


class Native:
    """A weight of 4 bits, (levels - 8) × scale + zero, or of 8 bits, levels × scale.

    `levels` [out, in] are from 0 to 15, or int8; `scale` and `zero` are [out, in / 32], rounded to fp16. Rows are
    quantised to 8 bits per group of 32 columns. A row's product is the same to the bit whatever rows stand beside it.
    """

    __slots__ = ("_about", "_bias", "_blocks", "_library", "address", "in_features", "name", "out_features")

    rounding = torch.int8

    def __init__(self, levels: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None = None) -> None:
        """`zero` is None for 8 bits. Raises RuntimeError where the code cannot run."""
        found = library()
        if found is None:
            raise RuntimeError("no compiled code for this processor")
        self._library = found
        bits = 8 if zero is None else 4
        self.name = f"{found.instructions}{bits}"
        self.out_features, self.in_features = levels.shape
        self._blocks = _blocks8(levels, scale) if zero is None else _blocks4(levels, scale, zero)
        self._bias = None if bias is None else bias.float().contiguous()
        self._about = _Weight(
            bits,
            self.out_features,
            self.in_features,
            0,
            self._blocks.nbytes,
            0 if self._bias is None else self._bias.nbytes,
            self._blocks.data_ptr(),
            None if self._bias is None else self._bias.data_ptr(),
        )
        self.address = ctypes.addressof(self._about)

    @staticmethod
    def can_serve(out_features: int, in_features: int) -> bool:
        """Whether a weight of these sizes can be packed and multiplied on this machine."""
        return out_features % TILE == 0 and in_features % GROUP == 0 and library() is not None

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

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weight."""
        return self._blocks.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """The product [n, out] of rows `x` [n, in]."""
        return self.fused(x.float(), None, None).to(x.dtype)

    def fused(self, x: Tensor, norm: RmsNorm | None, residual: Tensor | None) -> Tensor:
        """W norm(x) + residual, [n, out] in fp32, of fp32 rows `x` [n, in].

        Raises RuntimeError if sizes do not agree.
        """
        x = x.contiguous()
        n = x.shape[0]
        y = floats(n, self.out_features)
        size = quantised_floats(n, self.in_features)
        memory = floats(size)
        if residual is not None:
            residual = residual.contiguous()
        code = self._library.linear(
            self.address,
            None if norm is None else norm.address,
            x.data_ptr(),
            x.nbytes,
            n,
            None if residual is None else residual.data_ptr(),
            0 if residual is None else residual.nbytes,
            y.data_ptr(),
            memory.data_ptr(),
            size,
            torch.get_num_threads(),
        )
        if code:
            raise self._library.refusal(code)
        return y

    def fused_mlp(self, down: Native, x: Tensor, norm: RmsNorm | None) -> Tensor:
        """x + W_down (SiLU(W_gate norm(x)) × W_up norm(x)) of fp32 rows `x` [n, in]; this weight is gate, then up.

        Raises RuntimeError if sizes do not agree.
        """
        x = x.contiguous()
        n = x.shape[0]
        y = floats(n, down.out_features)
        inner = down.in_features
        size = n * inner + quantised_floats(n, self.in_features) + quantised_floats(n, inner)
        memory = floats(size)
        code = self._library.mlp(
            self.address,
            down.address,
            None if norm is None else norm.address,
            x.data_ptr(),
            x.nbytes,
            n,
            y.data_ptr(),
            memory.data_ptr(),
            size,
            torch.get_num_threads(),
        )
        if code:
            raise self._library.refusal(code)
        return y


def quantised_floats(n: int, width: int) -> int:
    """The number of floats that `n` quantised rows of `width` columns take."""
    return n * (width // 4 + 3 * (width // GROUP))


def _blocks4(levels: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    fours = _tiles(levels)
    pairs = (fours[:, :, 0::2] | (fours[:, :, 1::2] << 4)).flatten(2)
    return torch.cat([pairs, _fp16_bytes(scale), _fp16_bytes(zero - 8 * scale)], -1).contiguous()


def _blocks8(levels: Tensor, scale: Tensor) -> Tensor:
    unsigned = (levels.view(torch.uint8) ^ 128).contiguous()
    return torch.cat([_tiles(unsigned).flatten(2), _fp16_bytes(scale)], -1).contiguous()


def _tiles(levels: Tensor) -> Tensor:
    """Levels uint8 as [tiles, groups, 8, 16 outputs, 4 columns]."""
    out, width = levels.shape
    parts = levels.to(torch.uint8).view(out // TILE, TILE, width // GROUP, 8, 4)
    return parts.permute(0, 2, 3, 1, 4).contiguous()


def _fp16_bytes(numbers: Tensor) -> Tensor:
    """Numbers [out, groups] as the bytes [tiles, groups, 32] of their fp16 forms."""
    tiles = numbers.to(torch.float16).view(-1, TILE, numbers.shape[1]).transpose(1, 2)
    return tiles.contiguous().view(torch.uint8)


def quantised_groups(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Levels int8 [out, in] and scales [out, in / 32] of a weight [out, in], with scales that fp16 holds exactly."""
    groups = weight.unflatten(1, (-1, GROUP))
    scale = (groups.abs().amax(-1) / 127).to(torch.float16).float().clamp_(min=SMALLEST_SCALE)
    return (groups / scale[..., None]).round_().clamp_(-127, 127).to(torch.int8).flatten(1), scale
