"""Random attention blocks of our own kernels, on random sequences, and what they should compute."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, rms_norm, silu

from ssd_runtime.model.batch.rotary import Rotation, by_heads, rotate
from ssd_runtime.model.cache.kv_cache import dequantised_slots, quantised_slots
from ssd_runtime.model.sublayers.native_attention import NativeAttention
from ssd_runtime.weights.kernels.kernel import Connection, RmsNorm, capped
from ssd_runtime.weights.kernels.native import Native
from ssd_runtime.weights.kernels.native_mlp import Activation, Function, NativeMlp
from tests.native_weights import weight4, weight8, weight16

EPSILON = 1e-5


def any_weight(out: int, width: int, own: bool, quantised: bool | None = None) -> tuple[Native, Tensor]:
    """A random weight of 4, 8 or 16 bits that runs on threads of our own, or on torch's; and its numbers."""
    makers = {True: [weight4, weight8], False: [weight16], None: [weight4, weight8, weight16]}[quantised]
    kernel, dense = random.choice(makers)(out, width)
    kernel.own_threads = own
    return kernel, dense


def any_norm(width: int) -> RmsNorm | None:
    """A random norm of rows of `width` numbers, or none."""
    return random.choice([None, RmsNorm(torch.rand(width), EPSILON)])


def any_connection(hidden: int, is_normed: bool = False) -> Connection | None:
    """A random connection to the residual stream, or none; if `is_normed`, one with a norm before the block."""
    before = RmsNorm(torch.rand(hidden), EPSILON) if is_normed else any_norm(hidden)
    found = Connection(before, any_norm(hidden), random.choice([1.0, 0.3]))
    return random.choice([Connection(before), found, found if is_normed else None])


def normed(x: Tensor, norm: RmsNorm | None) -> Tensor:
    """The rows of `x`, normed."""
    return x if norm is None else rms_norm(x, (len(norm.weight),), norm.weight, EPSILON)


def connected(x: Tensor, connection: Connection | None, block: Callable[[Tensor], Tensor]) -> Tensor:
    """The expected result of a block with this connection for `x`."""
    if connection is None:
        return block(x)
    return x + connection.factor * normed(block(normed(x, connection.norm)), connection.after)


def silu_mlp(gate_up: Native, down: Native) -> NativeMlp:
    """An MLP with the usual activation."""
    return NativeMlp(gate_up, down, Activation(Function.SILU))


def any_activation() -> Activation:
    """A random way to join gate and up."""
    return Activation(random.choice(list(Function)), 1.7, 5.0)


def activated(by: Activation, gate: Tensor, up: Tensor) -> Tensor:
    """The expected input of the last projection for gate and up."""
    if by.function == Function.CLAMPED:
        gate = gate.clamp(max=by.limit)
        return gate * torch.sigmoid(by.alpha * gate) * (up.clamp(-by.limit, by.limit) + 1)
    return (silu(gate) if by.function == Function.SILU else gelu(gate, approximate="tanh")) * up


class Block:
    """A random attention block on random sequences."""

    def __init__(self, own: bool, head_dims: tuple[int, ...] = (16, 32, 64)) -> None:
        self.head_dim, group = random.choice(head_dims), random.choice([1, 2, 3])
        self.kv_heads = random.choice([2, 4])
        self.heads, self.hidden = self.kv_heads * group, 32 * random.randint(1, 6)
        self.connection = any_connection(self.hidden)
        self.gated = random.choice([False, False, True])
        heads, kv_heads = self.heads, self.kv_heads
        together = random.choice([False, not self.gated])
        self.norms = [any_norm(self.head_dim * (count if together else 1)) for count in (heads, kv_heads)]
        self.norms.append(any_norm(self.head_dim))
        self.made = 2 if together else random.choice([0, 1, 2])
        own_heads, rest = heads * (1 + self.gated), [kv_heads] * self.made
        sizes = random.choice([[own_heads, *rest], [own_heads + sum(rest)], [own_heads + sum(rest[1:]), *rest[:1]]])
        self.quantised = random.choice([True, False])
        qkv = [any_weight(size * self.head_dim, self.hidden, own, self.quantised) for size in sizes]
        output, self.dense_output = any_weight(self.hidden, heads * self.head_dim, own)
        self.dense_qkv = torch.cat([dense for _, dense in qkv])
        size = float((normed(torch.randn(9, self.hidden), self.norm) @ self.dense_qkv.T).square().mean())
        unnormed = sum(each is None for each in self.norms[: 2 if self.made else 1])
        self.scale = self.head_dim**-0.5 / size ** (unnormed / 2)
        """Scores are about 1, so that rounding of rows moves shares little."""
        self.parts: dict[str, Any] = {
            "qkv": [kernel for kernel, _ in qkv],
            "output": output,
            "connection": self.connection,
            "q_norm": self.norms[0],
            "k_norm": self.norms[1],
            "v_norm": self.norms[2],
            "made": self.made,
            "gated": self.gated,
            "norms_last": random.choice([False, not together]),
            "alternate": random.choice([False, True]),
            "heads": heads,
            "kv_heads": kv_heads,
            "head_dim": self.head_dim,
            "scale": self.scale,
            "cap": random.choice([0.0, 1.5]),
            "kv_bits": random.choice([8, 32]),
            "sinks": random.choice([None, 2 * torch.randn(heads)]),
        }
        self.attention = NativeAttention(**self.parts)
        self.rows = [random.choice([1, 2, 7, 20]) for _ in range(random.choice([1, 1, 3]))]
        self.known = [random.randint(0, 200) for _ in self.rows]
        self.caches = [
            self.stored(torch.randn(2, kv_heads, known + rows, self.head_dim)) for known, rows in self.pairs()
        ]
        self.biases = [random.choice([None, self.bias(*pair)]) for pair in self.pairs()]
        width = random.choice([self.head_dim, self.head_dim // 2])
        self.angles = torch.rand(sum(self.rows), random.choice([1, 2]), width)
        self.rotation: Rotation | None = random.choice(
            [None, (self.angles.cos().contiguous(), self.angles.sin().contiguous())]
        )

    @property
    def norm(self) -> RmsNorm | None:
        """The norm of its input."""
        return None if self.connection is None else self.connection.norm

    def pairs(self) -> list[tuple[int, int]]:
        return list(zip(self.known, self.rows, strict=True))

    def stored(self, numbers: Tensor) -> Tensor:
        """Keys and values as the block's caches hold them."""
        return quantised_slots(numbers) if self.parts["kv_bits"] == 8 else numbers

    def numbers(self, cache: Tensor) -> Tensor:
        """A copy of the keys and values that a cache holds."""
        return dequantised_slots(cache) if self.parts["kv_bits"] == 8 else cache.clone()

    @staticmethod
    def bias(known: int, rows: int) -> Tensor:
        visible = torch.rand(rows, known + rows) < 0.7
        visible[:, known:].fill_diagonal_(True)
        return torch.zeros(rows, known + rows).masked_fill_(~visible, -torch.inf)

    def segments(self, caches: list[Tensor]) -> list[Any]:
        """The sequences on these caches, as the engine gives them."""
        found = []
        for cache, bias, (known, rows) in zip(caches, self.biases, self.pairs(), strict=True):
            keys, values = cache
            address = keys.data_ptr(), values.data_ptr(), keys.nbytes, keys.shape[1], keys[0].nbytes
            view = SimpleNamespace(begin=0, end=known + rows, bias=bias)
            owner = SimpleNamespace(address=lambda layer, begin, address=address: address)
            found.append(SimpleNamespace(views=[view], rows=rows, slot=known, cache=owner))
        return found

    def __call__(self, x: Tensor) -> Tensor:
        """The block's output, and the keys and values that it wrote."""
        caches = [cache.clone() for cache in self.caches]
        y = self.attention(0, 0, x, self.segments(caches), self.rotation)
        return torch.cat([y.flatten(), *(self.numbers(cache).flatten() for cache in caches)])

    def expected(self, x: Tensor) -> Tensor:
        """What the call returns if rows are not rounded."""
        caches = [self.numbers(cache) for cache in self.caches]
        y = connected(x, self.connection, lambda rows: self._output(rows, caches))
        return torch.cat([y.flatten(), *(cache.flatten() for cache in caches)])

    def _output(self, x: Tensor, caches: list[Tensor]) -> Tensor:
        """The output of normed rows; writes keys and values to `caches`."""
        heads, kv_heads, size = self.heads, self.kv_heads, self.head_dim
        sizes = heads * (1 + self.gated) * size, self.made * kv_heads * size
        queries, rest = (x @ self.dense_qkv.T).split(sizes, 1)
        keys, values = rest[:, : kv_heads * size], rest[:, -kv_heads * size :]
        gates = None
        if self.gated:
            queries, gates = (each.flatten(1) for each in queries.unflatten(1, (heads, 2, size)).unbind(2))
        first, last = ((None, None), self.norms) if self.parts["norms_last"] else (self.norms, (None, None))
        turned = torch.cat([self._heads(queries, first[0]), self._heads(keys, first[1])], 1)
        if self.rotation is not None:
            cos, sin = by_heads(self.rotation, heads, keys.shape[1] // size)
            turned = rotate(turned, (cos[:, : turned.shape[1]], sin[:, : turned.shape[1]]), self.parts["alternate"])
        queries, keys = (
            self._heads(each.flatten(1), norm)
            for each, norm in zip((turned[:, :heads], turned[:, heads:]), last, strict=False)
        )
        values, mixed, at = self._heads(values, self.norms[2]), list[Tensor](), 0
        for cache, bias, (known, rows) in zip(caches, self.biases, self.pairs(), strict=True):
            own = slice(at, at + rows)
            if self.made:
                cache[:, :, known:] = torch.stack([keys[own], values[own]]).transpose(1, 2)
            seen = cache.repeat_interleave(heads // kv_heads, 1)
            scores = queries[own].transpose(0, 1) @ seen[0].transpose(1, 2) * self.scale
            scores = capped(scores, self.parts["cap"] or None)
            scores = scores if bias is None else scores + bias
            if (sinks := self.parts["sinks"]) is not None:
                scores = torch.cat([scores, sinks.view(-1, 1, 1).expand(-1, rows, 1)], -1)
            mixed.append((scores.softmax(-1)[..., : known + rows] @ seen[1]).transpose(0, 1).flatten(1))
            at += rows
        whole = torch.cat(mixed)
        return (whole if gates is None else whole * gates.sigmoid()) @ self.dense_output.T

    def _heads(self, x: Tensor, norm: RmsNorm | None) -> Tensor:
        """The heads [n, heads, head_dim] of `x`, each normed, or all together."""
        width = self.head_dim if norm is None else len(norm.weight)
        return normed(x.unflatten(1, (-1, width)), norm).flatten(1).unflatten(1, (-1, self.head_dim))
