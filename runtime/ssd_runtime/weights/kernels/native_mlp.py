"""A gated MLP, or a mixture of them with its router, as one call of our own code (`native/mlp.h`, `experts.h`)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from ssd_runtime.weights.kernels.kernel import RmsNorm
from ssd_runtime.weights.kernels.native import Native
from ssd_runtime.weights.native.library import floats


class NativeMlp(NamedTuple):
    """x + W_down (SiLU(W_gate norm(x)) × W_up norm(x)); `gate_up` is the weight of gate, then that of up."""

    gate_up: Native
    down: Native

    @property
    def sizes(self) -> tuple[int, ...]:
        """MLPs of equal sizes take equal memory (`floats`)."""
        return self.gate_up.row_floats, self.down.row_floats, self.down.in_features

    def floats(self, n: int) -> int:
        """The numbers of memory that a call of `n` rows takes."""
        return n * sum(self.sizes)

    def __call__(self, x: Tensor, norm: RmsNorm | None) -> Tensor:
        """The block's result [n, hidden] for fp32 states `x` [n, hidden]. Raises RuntimeError if sizes do not agree."""
        x = x.contiguous()
        n = x.shape[0]
        found = self.gate_up.library
        return found.write(
            floats(n, self.down.out_features),
            self.floats(n),
            found.mlp,
            self.gate_up.address,
            self.down.address,
            None if norm is None else norm.address,
            x.data_ptr(),
            x.nbytes,
            n,
        )


class Routing(IntEnum):
    """Who chooses a row's experts and their weights (`Routing` in `native/experts.h`)."""

    GIVEN = 0
    """The caller."""
    SOFTMAX = 1
    """The largest of a softmax of scores, which are products of a router's weight."""
    SHARES = 2
    """The same, divided by their sum."""


class Clamp(ctypes.Structure):
    """The activation min(gate, limit) × σ(alpha × min(gate, limit)) × (up + 1), with up within ± limit (GPT-OSS)."""

    _fields_ = (("alpha", ctypes.c_float), ("limit", ctypes.c_float))


class Router(NamedTuple):
    """The scores of experts are products of a row with `weight` [experts, hidden], plus `bias` [experts], in fp32."""

    weight: Tensor
    bias: Tensor | None
    each: int
    """Experts per row."""
    routing: Routing


class _Experts(ctypes.Structure):
    _fields_ = (
        ("gate_up", ctypes.c_void_p),
        ("down", ctypes.c_void_p),
        ("router", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("clamp", ctypes.c_void_p),
        ("router_bytes", ctypes.c_int64),
        ("bias_bytes", ctypes.c_int64),
        ("bytes", ctypes.c_int64),
        ("number", ctypes.c_int64),
        ("each", ctypes.c_int64),
        ("routing", ctypes.c_int64),
    )


class NativeExperts:
    """The weighted sum of the outputs of a row's experts, each of which is a gated MLP.

    A row's result is the same to the bit whatever rows stand beside it.
    """

    def __init__(
        self, experts: Sequence[NativeMlp], router: Router | None = None, clamp: tuple[float, float] | None = None
    ) -> None:
        """Experts of one size and format. Without a router, calls are given the choice.

        `clamp` has alpha and limit of the clamped activation; without it gate and up are joined as in `NativeMlp`.
        """
        gate_up, down = (
            (ctypes.c_void_p * len(experts))(*(each.address for each in part)) for part in zip(*experts, strict=True)
        )
        activation = None if clamp is None else Clamp(*clamp)
        self._parts = tuple(experts), router, gate_up, down, activation  # what the structure points to
        self._first = experts[0]
        self._about = _Experts(
            gate_up=ctypes.addressof(gate_up),
            down=ctypes.addressof(down),
            bytes=ctypes.sizeof(gate_up),
            number=len(experts),
            each=1,
            clamp=None if activation is None else ctypes.addressof(activation),
        )
        if router is not None:
            self._about.router, self._about.router_bytes = router.weight.data_ptr(), router.weight.nbytes
            self._about.each, self._about.routing = router.each, router.routing
            if router.bias is not None:
                self._about.bias, self._about.bias_bytes = router.bias.data_ptr(), router.bias.nbytes
        self.address = ctypes.addressof(self._about)

    @property
    def routes(self) -> bool:
        """Whether it has a router."""
        return self._about.routing != Routing.GIVEN

    @property
    def sizes(self) -> tuple[int, ...]:
        """Mixtures of equal sizes take equal memory (`floats`)."""
        return *self._first.sizes, self._first.down.out_features, self._about.number, self._about.each

    def floats(self, n: int) -> int:
        """The numbers of memory that a call of `n` rows takes."""
        pairs, number, hidden = n * self._about.each, self._about.number, self._first.down.out_features
        return n * (hidden + number) + pairs * (sum(self._first.sizes) + hidden + 3) + 3 * number + 2

    def __call__(self, x: Tensor, norm: RmsNorm | None) -> Tensor:
        """The block's result [n, hidden] of fp32 states `x` [n, hidden], which are added to the sum for norm(x).

        Raises RuntimeError if sizes do not agree, or if there is no router.
        """
        return self._call(x, norm, None, added=True)

    def of_normed(self, x: Tensor, choice: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """The sum [n, hidden] for fp32 rows `x` [n, hidden], with the caller's `choice` where there is no router.

        That is the weights [n, k] and the numbers of experts [n, k]. Raises RuntimeError if sizes do not agree.
        """
        return self._call(x, None, choice, added=False)

    def _call(self, x: Tensor, norm: RmsNorm | None, choice: tuple[Tensor, Tensor] | None, added: bool) -> Tensor:
        x = x.contiguous()
        n = x.shape[0]
        weights = chosen = None
        if choice is not None:
            weights, chosen = choice[0].float().contiguous(), choice[1].to(torch.int32).contiguous()
            self._about.each = chosen.shape[1]
        found = self._first.gate_up.library
        return found.write(
            torch.empty_like(x),
            self.floats(n),
            found.experts,
            self.address,
            None if norm is None else norm.address,
            x.data_ptr(),
            x.nbytes,
            n,
            None if chosen is None else chosen.data_ptr(),
            None if weights is None else weights.data_ptr(),
            0 if chosen is None else chosen.nbytes,
            int(added),
        )
