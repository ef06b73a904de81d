"""Random attention blocks of our own kernels, on random sequences, and what they should compute."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from ssd_runtime.model.batch.rotary import Rotation, rotate
from ssd_runtime.model.cache.kv_cache import dequantised_slots, quantised_slots
from ssd_runtime.model.sublayers.native_attention import NativeAttention
from ssd_runtime.weights.kernels.kernel import RmsNorm
from ssd_runtime.weights.kernels.native import Native
from tests.native_weights import weight4, weight8, weight16

EPSILON = 1e-5


def any_weight(out: int, width: int, own: bool, quantised: bool | None = None) -> tuple[Native, Tensor]:
    """A random weight of 4, 8 or 16 bits that runs on threads of our own, or on torch's; and its numbers."""
    makers = {True: [weight4, weight8], False: [weight16], None: [weight4, weight8, weight16]}[quantised]
    kernel, dense = random.choice(makers)(out, width)
    kernel.own_threads = own
    return kernel, dense


class Block:
    """A random attention block on random sequences."""

    def __init__(self, own: bool, head_dims: tuple[int, ...] = (16, 32, 64)) -> None:
        self.head_dim, group = random.choice(head_dims), random.choice([1, 2, 3])
        self.kv_heads = random.choice([2, 4])
        self.heads, self.hidden = self.kv_heads * group, 32 * random.randint(1, 6)
        self.norm = RmsNorm(torch.rand(self.hidden), EPSILON)
        self.head_norm = random.choice([None, RmsNorm(torch.rand(self.head_dim), EPSILON)])
        heads, kv_heads = self.heads, self.kv_heads
        sizes = random.choice([[heads + 2 * kv_heads], [heads + kv_heads, kv_heads], [heads, kv_heads, kv_heads]])
        self.quantised = random.choice([True, False])
        qkv = [any_weight(size * self.head_dim, self.hidden, own, self.quantised) for size in sizes]
        output, self.dense_output = any_weight(self.hidden, heads * self.head_dim, own)
        self.dense_qkv = torch.cat([dense for _, dense in qkv])
        size = 1.0 if self.head_norm else float((self.dense_qkv * self.norm.weight).square().sum(1).mean())
        self.scale = self.head_dim**-0.5 / size
        """Scores are about 1, so that rounding of rows moves shares little."""
        self.parts: dict[str, Any] = {
            "qkv": [kernel for kernel, _ in qkv],
            "output": output,
            "norm": self.norm,
            "q_norm": self.head_norm,
            "k_norm": self.head_norm,
            "heads": heads,
            "kv_heads": kv_heads,
            "head_dim": self.head_dim,
            "scale": self.scale,
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
        angles = torch.rand(sum(self.rows), heads + 2 * kv_heads, width)
        # The code reads the angles of the first head of queries and of the first of keys.
        self.angles = torch.cat(
            [angles[:, :1].expand(-1, heads, -1), angles[:, heads : heads + 1].expand(-1, 2 * kv_heads, -1)], 1
        )
        self.rotation: Rotation | None = random.choice(
            [None, (self.angles.cos().contiguous(), self.angles.sin().contiguous())]
        )

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
        heads, kv_heads = self.heads, self.kv_heads
        qkv = rms_norm(x, (self.hidden,), self.norm.weight, EPSILON) @ self.dense_qkv.T
        queries, keys, values = qkv.unflatten(1, (-1, self.head_dim)).split([heads, kv_heads, kv_heads], 1)
        turned = torch.cat([queries, keys], 1)
        if self.head_norm is not None:
            turned = rms_norm(turned, (self.head_dim,), self.head_norm.weight, EPSILON)
        if self.rotation is not None:
            turned = rotate(turned, tuple(each[:, : heads + kv_heads] for each in self.rotation))  # type: ignore[arg-type]
        queries, keys = turned.split([heads, kv_heads], 1)
        caches, mixed, at = [self.numbers(cache) for cache in self.caches], list[Tensor](), 0
        for cache, bias, (known, rows) in zip(caches, self.biases, self.pairs(), strict=True):
            own = slice(at, at + rows)
            cache[:, :, known:] = torch.stack([keys[own], values[own]]).transpose(1, 2)
            seen = cache.repeat_interleave(heads // kv_heads, 1)
            scores = queries[own].transpose(0, 1) @ seen[0].transpose(1, 2) * self.scale
            scores = scores if bias is None else scores + bias
            if (sinks := self.parts["sinks"]) is not None:
                scores = torch.cat([scores, sinks.view(-1, 1, 1).expand(-1, rows, 1)], -1)
            mixed.append((scores.softmax(-1)[..., : known + rows] @ seen[1]).transpose(0, 1).flatten(1))
            at += rows
        y = x + torch.cat(mixed) @ self.dense_output.T
        return torch.cat([y.flatten(), *(cache.flatten() for cache in caches)])
