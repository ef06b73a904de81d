"""A gated MLP, or a mixture of them with its router, as one call of our own code (`native/mlp.h`, `experts.h`)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from ssd_runtime.weights.kernels.kernel import Connection, RmsNorm
from ssd_runtime.weights.kernels.native import Native
from ssd_runtime.weights.native.library import COUNT, POINTER, fields, floats


class Function(IntEnum):
    """The functions that join gate and up (`Function` in `native/mlp.h`)."""

    SILU = 0
    """SiLU(gate) × up."""
    GELU = 1
    """GELU(gate) × up, in its form with a tanh."""
    CLAMPED = 2
    """min(gate, limit) × σ(alpha × min(gate, limit)) × (up + 1), with up within ± limit (GPT-OSS)."""


class Activation(ctypes.Structure):
    """A function that joins gate and up; `alpha` and `limit` are those of the clamped one."""

    _fields_ = (("function", ctypes.c_int64), ("alpha", ctypes.c_float), ("limit", ctypes.c_float))


class NativeMlp(NamedTuple):
    """W_down activation(W_gate x, W_up x); `gate_up` is the weight of gate, then that of up."""

    gate_up: Native
    down: Native
    activation: Activation

    @property
    def hidden(self) -> int:
        """The numbers of a row."""
        return self.down.out_features

    @property
    def sizes(self) -> tuple[int, ...]:
        """MLPs of equal sizes take equal memory (`floats`)."""
        return self.gate_up.row_floats, self.down.row_floats, self.down.in_features

    def floats(self, n: int) -> int:
        """The numbers of memory that a call of `n` rows takes."""
        return n * sum(self.sizes)

    def __call__(self, x: Tensor, connection: Connection | None) -> Tensor:
        """The block's result [n, hidden] for fp32 states `x` [n, hidden]. Raises RuntimeError if sizes do not agree."""
        x = x.contiguous()
        n = x.shape[0]
        found = self.gate_up.library
        return found.write(
            floats(n, self.hidden),
            self.floats(n),
            found.mlp,
            self.gate_up.address,
            self.down.address,
            ctypes.addressof(self.activation),
            None if connection is None else connection.address,
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
    SIGMOIDS = 3
    """The largest sums of a bias and a sigmoid of scores; weights are the sigmoids, divided by their sum + 1e-6."""


class Router(NamedTuple):
    """The scores of experts are products of a row with `weight` [experts, hidden], in fp32.

    `bias` [experts] is added to them, or by `Routing.SIGMOIDS` to their sigmoids.
    """

    weight: Tensor
    bias: Tensor | None
    each: int
    """Experts per row."""
    routing: Routing
    factors: Tensor | None = None
    """Factors [experts] of the weights of a row's experts; None for 1."""
    norm: RmsNorm | None = None
    """Norm of the states that it receives in the place of the block's rows; None where it receives those."""


class Shared(NamedTuple):
    """An expert that all rows go to, and norms where the others lie beside it."""

    mlp: NativeMlp
    gate: Tensor | None
    """Weight [hidden] in fp32: the sigmoid of its product with a row is the factor of the row's output; None for 1."""
    norm: RmsNorm | None = None
    """Norm of the states that the other experts receive in the place of the block's rows; None where they receive
    those."""
    after: RmsNorm | None = None
    """Norm of the others' weighted sum; None for none."""
    shared_after: RmsNorm | None = None
    """Norm of its own output; None for none."""


class _Shared(ctypes.Structure):
    _fields_ = (*fields(POINTER, "gate_up down gate"), *fields(COUNT, "gate_bytes"), *fields(POINTER, "after"))


class _Experts(ctypes.Structure):
    _fields_ = (
        *fields(POINTER, "gate_up down router bias factors activation shared router_norm norm after"),
        *fields(COUNT, "router_bytes bias_bytes factor_bytes bytes number each routing"),
    )


class NativeExperts:
    """The weighted sum of the outputs of a row's experts, each of which is a gated MLP, and that of one of all rows.

    A row's result is the same to the bit whatever rows stand beside it.
    """

    def __init__(
        self, experts: Sequence[NativeMlp], router: Router | None = None, shared: Shared | None = None
    ) -> None:
        """Experts of one size, format and activation. Without a router, calls are given the choice.

        The expert `shared` has their activation, too.
        """
        pointers = ctypes.c_void_p * len(experts)
        gate_up, down = (pointers(*(each[part].address for each in experts)) for part in (0, 1))
        self._parts = tuple(experts), router, gate_up, down, shared  # what the structure points to
        self._first = experts[0]
        self._about = _Experts(
            gate_up=ctypes.addressof(gate_up),
            down=ctypes.addressof(down),
            bytes=ctypes.sizeof(gate_up),
            number=len(experts),
            each=1,
            activation=ctypes.addressof(self._first.activation),
        )
        if router is not None:
            self._about.router, self._about.router_bytes = router.weight.data_ptr(), router.weight.nbytes
            self._about.each, self._about.routing = router.each, router.routing
            if router.bias is not None:
                self._about.bias, self._about.bias_bytes = router.bias.data_ptr(), router.bias.nbytes
            if router.factors is not None:
                self._about.factors, self._about.factor_bytes = router.factors.data_ptr(), router.factors.nbytes
            self._about.router_norm = _address(router.norm)
        self._shared = None if shared is None else shared.mlp
        if shared is not None:
            self._about.norm, self._about.after = _address(shared.norm), _address(shared.after)
            self._of_all = _Shared(gate_up=shared.mlp.gate_up.address, down=shared.mlp.down.address)
            self._of_all.after = _address(shared.shared_after)
            if shared.gate is not None:
                self._of_all.gate, self._of_all.gate_bytes = shared.gate.data_ptr(), shared.gate.nbytes
            self._about.shared = ctypes.addressof(self._of_all)
        self.address = ctypes.addressof(self._about)

    @property
    def routes(self) -> bool:
        """Whether it has a router."""
        return self._about.routing != Routing.GIVEN

    @property
    def hidden(self) -> int:
        """The numbers of a row."""
        return self._first.hidden

    @property
    def sizes(self) -> tuple[int, ...]:
        """Mixtures of equal sizes take equal memory (`floats`)."""
        shared = () if self._shared is None else self._shared.sizes
        return *self._first.sizes, self.hidden, self._about.number, self._about.each, *shared

    def floats(self, n: int) -> int:
        """The numbers of memory that a call of `n` rows takes."""
        pairs, number, hidden = n * self._about.each, self._about.number, self.hidden
        shared = 0 if self._shared is None else self._shared.floats(n)
        of_rows = n * (4 * hidden + number) + shared
        return of_rows + pairs * (sum(self._first.sizes) + hidden + 3) + 3 * number + 2

    def __call__(self, x: Tensor, connection: Connection | None, choice: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """The block's result [n, hidden] for fp32 states `x` [n, hidden].

        Without a router, the caller's `choice` is the weights [n, k] and the numbers of experts [n, k]. Raises
        RuntimeError if sizes do not agree.
        """
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
            None if connection is None else connection.address,
            x.data_ptr(),
            x.nbytes,
            n,
            None if chosen is None else chosen.data_ptr(),
            None if weights is None else weights.data_ptr(),
            0 if chosen is None else chosen.nbytes,
        )


def _address(norm: RmsNorm | None) -> int | None:
    return None if norm is None else norm.address
