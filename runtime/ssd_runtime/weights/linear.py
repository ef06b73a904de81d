"""One small interface for every projection, whichever kernel serves it."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ssd_runtime.weights.hooks import hooked

TOLERANCE = 1e-4
"""Largest difference, relative to the largest output, that a fast kernel may show against the user's modules."""


@dataclass(slots=True)
class PackedMemory:
    """How many bytes packed copies of weights may take, and how many they do."""

    limit: int
    used: int = 0

    def claim(self, count: int) -> bool:
        """Take `count` bytes if there is room for them."""
        fits = self.used + count <= self.limit
        self.used += count if fits else 0
        return fits


ALWAYS = (True,)
"""Packed copies serve any number of rows."""


class Linear:
    """Projections that share an input: `x` [n, in] to their outputs side by side [n, out].

    Served by a oneDNN weight packed once (CPU, fp32), or by calling the user's modules as they are, whichever
    `serve` says is faster for so many rows. Packed weights are a copy, as far as `memory` allows one: they serve
    only an exact `nn.Linear` without hooks, are checked against it when built, and are built again when a
    weight, a hook or a module has changed.
    """

    __slots__ = ("_bias", "_last", "_memory", "_modules", "_names", "_packed", "_parent", "_serves", "_stamp")

    def __init__(self, parent: nn.Module, names: Sequence[str], memory: PackedMemory) -> None:
        self._parent, self._names = parent, tuple(names)
        self._memory = memory
        self._packed: Tensor | None = None
        self.serve(ALWAYS)
        self._build()

    @property
    def packed(self) -> bool:
        """Whether there is a packed copy."""
        return self._packed is not None

    @property
    def foreign(self) -> list[nn.Module]:
        """The modules that are not exactly a plain `nn.Linear`: quantised ones, adapters."""
        return [module for module in self._modules if not is_exact(module)]

    def serve(self, rows: Sequence[bool]) -> None:
        """Let the packed copy serve n rows where `rows[n - 1]` is true; the last entry holds for all more rows."""
        self._serves, self._last = tuple(rows), len(rows) - 1

    def __call__(self, x: Tensor) -> Tensor:
        """The projections of `x`."""
        if self._packed is not None and self._serves[min(x.shape[0] - 1, self._last)]:
            return self._multiplied(x, self._packed)
        if len(self._modules) == 1:
            return self._modules[0](x)
        return torch.cat([module(x) for module in self._modules], -1)

    def refresh(self) -> bool:
        """Build again if the user's modules have changed or been replaced; returns whether they have."""
        changed = self._stamp != stamp_of(self._found())
        if changed:
            self._build()
        return changed

    def _found(self) -> list[nn.Module]:
        return [getattr(self._parent, name) for name in self._names]

    def _build(self) -> None:
        self._modules = self._found()
        self._stamp = stamp_of(self._modules)
        self._bias: Tensor | None = None
        self._drop()
        linears = [module for module in self._modules if isinstance(module, nn.Linear) and _packable(module)]
        if len(linears) < len(self._modules) or not self._memory.claim(_bytes(linears)):
            return
        try:
            self._pack(linears)
        except Exception:  # whatever the operation cannot take, the modules can
            self._packed = None
        if self._packed is None:
            self._memory.used -= _bytes(linears)

    def _pack(self, linears: Sequence[nn.Linear]) -> None:
        """Pack the weights, unless what the copy gives differs from the modules."""
        weights = [linear.weight.detach() for linear in linears]
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        if any(linear.bias is not None for linear in linears):
            zeros = weight.new_zeros
            self._bias = torch.cat([zeros(x.out_features) if x.bias is None else x.bias.detach() for x in linears])
        packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        self._packed = packed if self._agrees(packed, weight.shape[1]) else None

    def _drop(self) -> None:
        if self._packed is not None:
            self._memory.used -= self._packed.numel() * self._packed.element_size()
            self._packed = None

    def _agrees(self, packed: Tensor, width: int) -> bool:
        probe = torch.linspace(-1, 1, width)[None]
        expected = torch.cat([module(probe) for module in self._modules], -1)
        difference = (self._multiplied(probe, packed) - expected).abs().max()
        return bool(difference <= TOLERANCE * expected.abs().max().clamp(min=1e-6))

    def _multiplied(self, x: Tensor, packed: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise.default(x, packed, self._bias, "none", [], "")


def can_pack(model: nn.Module) -> bool:
    """Whether packed weights can serve any of the model's projections."""
    weight = next(model.parameters())
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )


def _bytes(linears: Sequence[nn.Linear]) -> int:
    return sum(linear.weight.numel() * linear.weight.element_size() for linear in linears)


def is_exact(module: nn.Module) -> bool:
    """Whether the module multiplies by a plain weight; subclasses of tensors, as torchao's, may do anything else."""
    return type(module) is nn.Linear and type(module.weight) is nn.Parameter


def named(modules: Sequence[nn.Module]) -> str:
    """The kinds of some modules with their numbers, and a digest of what they and their tensors are; "" for none.

    Latencies of a model depend on it: its quantised version, or one with adapters, takes another time.
    """
    if not modules:
        return ""
    kinds = Counter(f"{type(module).__module__.partition('.')[0]}.{type(module).__name__}" for module in modules)
    about = hashlib.sha256()
    for module in modules:
        tensors = [(tensor.dtype, tuple(tensor.shape)) for tensor in (*module.parameters(), *module.buffers())]
        about.update(f"{module.extra_repr()} {tensors}".encode())
    digest = about.hexdigest()[:6]
    return f" with {', '.join(f'{count} {kind}' for kind, count in sorted(kinds.items()))} ({digest})"


def _packable(module: nn.Linear) -> bool:
    return (
        is_exact(module)
        and module.weight.dtype == torch.float32
        and module.weight.device.type == "cpu"
        and not hooked(module)
    )


def stamp_of(modules: Sequence[nn.Module]) -> list[Any]:
    """Something that differs once a module, a hook or a weight has changed.

    Not where a weight is written in place through its `data`, or under inference mode: that leaves no trace.
    """
    return [
        (module, hooked(module), *((each.data_ptr(), each.is_inference() or each._version) for each in weights))
        for module, weights in ((module, list(module.parameters())) for module in modules)
    ]
