"""The interface through which every projection runs, whichever kernel serves it."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from ssd_runtime.devices.memory import gib
from ssd_runtime.weights.draft_bits import DraftBits
from ssd_runtime.weights.hooks import hooked
from ssd_runtime.weights.kernels.int8 import COLUMN_MULTIPLE
from ssd_runtime.weights.kernels.kernel import Kernel, RowNorm, capped
from ssd_runtime.weights.kernels.native import Native
from ssd_runtime.weights.kernels.onednn import OneDNN, can_serve
from ssd_runtime.weights.light import LightLinear, can_lighten, light_kernels, most_bytes
from ssd_runtime.weights.packed_linear import PackedLinear, whole_calls

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2}
"""Largest difference between a packed kernel and the user's modules, relative to the largest output. One rounding to
bf16 is 0.4%."""


@dataclass(slots=True)
class PackedMemory:
    """The memory budget of packed weights, in bytes."""

    limit: int
    used: int = 0

    def claim(self, count: int) -> bool:
        """Reserve `count` bytes if they are available. Returns whether they were."""
        fits = self.used + count <= self.limit
        self.used += count if fits else 0
        return fits


ALWAYS = (True,)
"""Setting of `Linear.serve` in which packed copies serve any number of rows."""


class Linear:
    """Projections that share an input, from `x` [n, in] to their concatenated outputs [n, out].

    The input's norm and the residual that is added to the output may be given along, since some kernels do all in one.

    They run on a packed copy of their weights (CPU, fp32 or bf16) or by calling the user's modules, whichever `serve`
    says is faster for n rows. Packed copies stay within the `memory` budget. They replace only exact `nn.Linear`
    modules without hooks, are checked against these when built, and are rebuilt when a weight, hook or module changes.
    Modules that hold a quantised file's weights (`PackedLinear`) share kernels, which are called directly.

    Drafts may run on light copies instead (`lighten`), within the same budget and of exact modules alone. They are
    rebuilt with the packed one. Of a quantised file's weights drafts read the high bits, without a copy.
    """

    def __init__(
        self,
        parent: nn.Module,
        names: Sequence[str],
        memory: PackedMemory,
        reordered: bool = True,
        factors: Tensor | None = None,
    ) -> None:
        """Projections `names` of `parent`; without `reordered` there is no packed copy of their weights.

        Their outputs are multiplied by `factors` [out] or [1].
        """
        self._factors = None if factors is None or bool((factors == 1).all()) else factors
        self._parent = parent
        self._names = tuple(names)
        self._memory = memory
        self._reordered = reordered
        self._packed: OneDNN | None = None
        self.copies = dict[int, LightLinear]()
        """The light copies by their bits."""
        self._bits: DraftBits = "none"
        self._both = False
        self.serve(ALWAYS)
        self._build()

    @property
    def packed(self) -> bool:
        """Whether a packed copy exists."""
        return self._packed is not None

    @property
    def by_kernel(self) -> bool:
        """Whether no module of the user's multiplies several rows at once; those of experts take one at a time."""
        return self.packed or bool(self.quantised) or not self._reordered

    def light(self, bits: int) -> Linear | LightLinear:
        """The copy in these bits, else the other copy, else these projections themselves."""
        return self.copies.get(bits) or next(iter(self.copies.values()), self)

    @property
    def foreign(self) -> list[nn.Module]:
        """Modules of other kinds than `nn.Linear` and `PackedLinear`, such as adapters and other quantised ones."""
        return [module for module in self._modules if not is_exact(module) and type(module) is not PackedLinear]

    @property
    def quantised(self) -> list[Kernel]:
        """The kernels of the modules that hold a quantised file's weights."""
        return [module.kernel for module in self._modules if type(module) is PackedLinear]

    def serve(self, rows: Sequence[bool]) -> None:
        """Let the packed copy serve n rows where `rows[n - 1]` is true. The last entry holds for all larger n."""
        self._serves = tuple(rows)

    def lighten(self, bits: DraftBits, both: bool) -> None:
        """Make the light copies that `bits` asks for (`light_kernels`), or drop them."""
        if (bits, both) != (self._bits, self._both):
            self._bits = bits
            self._both = both
            self._build_light()

    def light_bytes(self, bits: DraftBits, both: bool) -> int:
        """Bytes that light copies would take at most; 0 if there can be none."""
        found = self._originals()
        if bits == "none" or not found or not all(isinstance(x, Native) or can_lighten(x.weight) for x in found):
            return 0
        return most_bytes(sum(each.out_features for each in found), found[0].in_features, bits, both)

    @property
    def obstacle(self) -> str:
        """The condition that does not hold, and what to do; for projections without light copies."""
        found = self._originals()
        if self.quantised and not found:
            return "drafts read packed weights in fewer bits where most have 6 or 8; use --weights dense"
        if not found:
            kinds = ", ".join(sorted({type(module).__name__ for module in self._modules}))
            return f"no copy can stand in for its {kinds} modules; load it unquantised and without hooks"
        if isinstance(first := found[0], nn.Linear) and first.weight.device.type != "cpu":
            return f"its weights are on {first.weight.device}; use --device cpu"
        if isinstance(first, nn.Linear) and not can_lighten(first.weight):
            columns = first.in_features
            return f"its weights have {columns} columns, and the kernels take multiples of {COLUMN_MULTIPLE} alone"
        if self._bits == "none":
            return "--draft-bits none asks for none; give auto, 8 or 4"
        left = gib(self._memory.limit - self._memory.used)
        return f"{left} of memory are left for them; give more with --weight-memory"

    @property
    def natives(self) -> Sequence[Native]:
        """Our own kernels that compute the projections side by side; none where another kernel has a part in it."""
        natives = [call for call in self._calls if isinstance(call, Native) and self._factors is None]
        return natives if len(natives) == len(self._calls) else ()

    def __call__(
        self, x: Tensor, norm: RowNorm | None = None, residual: Tensor | None = None, cap: float | None = None
    ) -> Tensor:
        """The projections of `norm(x)`, `x` [n, in], plus `residual` [n, out]; or `capped`, without a residual."""
        if self.fused is not None and (norm is None or norm.rms is not None):
            return self.fused.fused(x, None if norm is None else norm.rms, residual, cap)
        y = self._product(x if norm is None else norm(x))
        y = y if self._factors is None else y * self._factors
        return capped(y, cap) if residual is None else residual + y

    def _product(self, x: Tensor) -> Tensor:
        if self._packed is not None and self._serves[min(x.shape[0], len(self._serves)) - 1]:
            return self._packed(x)
        if len(self._calls) == 1:
            return self._calls[0](x)
        return torch.cat([call(x) for call in self._calls], -1)

    def refresh(self) -> bool:
        """Rebuild if the user's modules have changed or were replaced; returns whether they have."""
        changed = self._stamp != stamp_of(self._found())
        if changed:
            self._build()
        return changed

    def _found(self) -> list[nn.Module]:
        return [getattr(self._parent, name) for name in self._names]

    def _build(self) -> None:
        self._modules = self._found()
        self._calls: Sequence[Callable[[Tensor], Tensor]] = whole_calls(self._modules)
        only = self._calls[0] if len(self._calls) == 1 else None
        self.fused = only if isinstance(only, Native) and self._factors is None else None
        """The kernel that computes all of the projections with norm and residual; None if there is none."""
        self._stamp = stamp_of(self._modules)
        self._build_packed()
        self._build_light()

    def _build_packed(self) -> None:
        """Pack the weights, and keep the copy only if its output agrees with the modules'."""
        if self._packed is not None:
            self._memory.used -= self._packed.nbytes
            self._packed = None
        linears = [linear for linear in self._copied() if can_serve(linear.weight)]
        size = sum(linear.weight.nbytes for linear in linears)
        if not self._reordered or len(linears) < len(self._modules) or not self._memory.claim(size):
            return
        with suppress(Exception):  # the modules serve whatever the packed operation cannot
            weight, bias = _joined(linears)
            packed = OneDNN(weight, bias)
            self._packed = packed if self._agrees(packed, weight) else None
        if self._packed is None:
            self._memory.used -= size

    def _build_light(self) -> None:
        self._memory.used -= sum(copy.nbytes for copy in self.copies.values())
        self.copies = {}
        if self._bits in ("auto", "4") and any(native.draft for native in self.natives):
            self.copies[4] = LightLinear([native.draft or native for native in self.natives], torch.float32)
            return
        most = self.light_bytes(self._bits, self._both)
        if most and self._memory.claim(most):
            weight, bias = _joined(found := self._originals())
            if self._factors is not None:
                weight, bias = weight * self._factors[:, None], None if bias is None else bias * self._factors
            kernels = light_kernels(weight, bias, self._bits, self._both)
            rows = torch.float32 if isinstance(found[0], Native) else weight.dtype
            self.copies = {bits: LightLinear([kernel], rows) for bits, kernel in kernels.items()}
            self._memory.used -= most - sum(kernel.nbytes for kernel in kernels.values())

    def _originals(self) -> Sequence[nn.Linear | Native]:
        """The modules or kernels whose numbers light copies are made of; none where there can be no copies."""
        return self.natives if self.natives and all(each.has_numbers for each in self.natives) else self._copied()

    def _copied(self) -> list[nn.Linear]:
        """The modules, if copies of their weights may stand in for them; otherwise none."""
        linears = [module for module in self._modules if is_exact(module) and not hooked(module)]
        return linears if len(linears) == len(self._modules) else []

    def _agrees(self, packed: OneDNN, weight: Tensor) -> bool:
        probe = torch.linspace(-1, 1, weight.shape[1], dtype=weight.dtype)[None]
        expected = torch.cat([module(probe) for module in self._modules], -1).float()
        difference = (packed(probe).float() - expected).abs().max()
        return bool(difference <= TOLERANCE[weight.dtype] * expected.abs().max().clamp(min=1e-6))


def is_exact(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether the module multiplies by a plain weight. Tensor subclasses, such as torchao's, may do anything else."""
    return type(module) is nn.Linear and type(module.weight) is nn.Parameter


def is_read(tensor: object) -> TypeGuard[Tensor]:
    """Whether our own code can read a parameter or a buffer where it lies."""
    if type(tensor) not in (nn.Parameter, Tensor) or not isinstance(tensor, Tensor) or not tensor.is_contiguous():
        return False
    return tensor.dtype == torch.float32 and tensor.device.type == "cpu"


def named(modules: Sequence[nn.Module]) -> str:
    """Describe modules by kind and number, with a digest of their settings and tensor shapes; "" for none.

    It is part of the latency key: a quantised model, or one with adapters, has other latencies.
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


def _joined(found: Sequence[nn.Linear | Native]) -> tuple[Tensor, Tensor | None]:
    """Weight [out, in] and bias [out] of modules or kernels side by side; the bias is None if none has one."""
    weights = [each.numbers if isinstance(each, Native) else each.weight.detach() for each in found]
    return side_by_side(weights, [None if each.bias is None else each.bias.detach() for each in found])


def side_by_side(weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> tuple[Tensor, Tensor | None]:
    """One weight [out, in] and bias [out] of several; the bias is None if none is given."""
    weight = weights[0] if len(weights) == 1 else torch.cat(list(weights))
    if all(bias is None for bias in biases):
        return weight, None
    parts = [weight.new_zeros(len(own)) if bias is None else bias for own, bias in zip(weights, biases, strict=True)]
    return weight, torch.cat(parts)


def stamp_of(modules: Sequence[nn.Module]) -> list[Any]:
    """A value that changes whenever a module, a hook or a weight does.

    Writes through `weight.data` or under inference mode leave no trace and go unnoticed.
    """
    return [
        (module, hooked(module), *(written(each) for each in weights))
        for module, weights in ((module, list(module.parameters())) for module in modules)
    ]


def written(tensor: Tensor) -> tuple[int, int]:
    """The place of a tensor's memory and how often it was written."""
    return tensor.data_ptr(), tensor.is_inference() or tensor._version
