"""The projections of a model's sub-layers and of its head, and the kernels that serve them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain, groupby

import torch
from torch import nn

from ssd_profiles.mask import BITS, SubLayerPlan
from ssd_runtime.model.layer.layer import Layer
from ssd_runtime.model.layer.layer_inputs import LayerInputs
from ssd_runtime.model.layer.mtp import Mtp
from ssd_runtime.weights.draft_bits import DraftBits
from ssd_runtime.weights.kernels.native import Native, use_huge_pages
from ssd_runtime.weights.linear import ALWAYS, Linear, PackedMemory, named

MOST_NESTED = 0.75
"""Largest share of a quantised file's bytes that drafts on high bits may read: a verification costs a quarter of a step
more than a step, so with more bytes even drafts that are always right gain nothing worth measuring."""


class Projections:
    """All projections of a decoder, in the order of its sub-layers; the head's follows, then that of `inputs`."""

    def __init__(
        self, layers: Sequence[Layer], head: Linear, inputs: LayerInputs | None = None, ahead: Mtp | None = None
    ) -> None:
        """Those of `ahead` are no part of a step, but share its threads and its huge pages."""
        self._layers = layers
        self._ahead = () if ahead is None else ahead.linears()
        self.head = head
        self._others = () if inputs is None else (inputs.projection,)
        self._serves: tuple[bool, ...] = ALWAYS

    def __iter__(self) -> Iterator[Linear]:
        for _, linears in self.by_sublayer():
            yield from linears
        yield from self._others

    def by_sublayer(self) -> Iterator[tuple[int, Sequence[Linear]]]:
        """The projections of each sub-layer, by its index, and of the head (2L)."""
        for index, layer in enumerate(self._layers):
            linears, mixing = layer.linears(), len(layer.mixing())
            yield 2 * index, linears[:mixing]
            yield 2 * index + 1, linears[mixing:]
        yield 2 * len(self._layers), (self.head,)

    @property
    def kernels(self) -> str:
        """The names of the kernels, and what `packed` copies serve if not everything.

        Examples: `module`, `packed`, `packed 120 of 121 rows 4+`. The formats of a quantised file and foreign modules
        follow, as in `module vnni4 vnni8`.
        """
        packed = [linear.packed for linear in self]
        formats = dict.fromkeys(kernel.name for linear in self for kernel in linear.quantised)
        beside = "".join(f" {name}" for name in formats) + named(self.foreign)
        if not any(packed) or not any(self._serves):
            return f"module{beside}"
        where = "" if all(packed) else f" {sum(packed)} of {len(packed)}"
        rows = "" if all(self._serves) else f" rows {_ranges(self._serves)}"
        return f"packed{where}{rows}{beside}"

    @property
    def native_bytes(self) -> int:
        """Bytes of the model's weights that our own kernels read."""
        return sum(native.nbytes for linear in self for native in linear.natives)

    @property
    def quantised_bytes(self) -> int:
        """Bytes among these of quantised weights."""
        return sum(native.nbytes for native in self._quantised())

    @property
    def draft_bytes(self) -> int:
        """Bytes among `quantised_bytes` that drafts on the high bits alone read."""
        return sum(native.draft_bytes for native in self._quantised())

    def _quantised(self) -> Iterator[Native]:
        return (native for linear in self for native in linear.natives if not native.has_numbers)

    @property
    def are_packed(self) -> bool:
        """Whether packed kernels serve all of them, whatever the number of rows."""
        return all(linear.by_kernel for linear in self) and all(self._serves)

    @property
    def foreign(self) -> list[nn.Module]:
        """The modules that are not a plain `nn.Linear`, such as quantised ones and adapters."""
        return [module for linear in self for module in linear.foreign]

    def rounding(self, dtype: torch.dtype) -> torch.dtype:
        """The coarsest dtype to which rows are rounded: that of a quantised file's kernels, else the model's own."""
        found = {kernel.rounding for linear in self for kernel in linear.quantised}
        return min(found, key=lambda each: each.itemsize, default=dtype)

    def use_own_threads(self, own: bool) -> None:
        """Run our own kernels on threads of our own, or on torch's (`Native.own_threads`)."""
        for native in self._natives():
            native.own_threads = own
        for layer in self._layers:
            if layer.state is not None and layer.state.native is not None:
                layer.state.native.own_threads = own

    def use_huge_pages(self) -> None:
        """Move our own kernels' weights into huge pages."""
        use_huge_pages(self._natives())

    def _natives(self) -> Iterator[Native]:
        """Our own kernels of the model's weights and of light copies."""
        copies = (kernel for linear in self for copy in linear.copies.values() for kernel in copy.kernels)
        kernels = chain((native for linear in (*self, *self._ahead) for native in linear.natives), copies)
        return (kernel for kernel in kernels if isinstance(kernel, Native))

    def serve(self, rows: Sequence[bool]) -> None:
        """Let packed copies serve forwards of n rows if `rows[n - 1]` is true; the last entry holds beyond its end."""
        self._serves = tuple(rows)
        for linear in self:
            linear.serve(rows)


class LightCopies:
    """The light copies of the projections' weights, on which drafts run; none are made until `make`."""

    def __init__(self, projections: Projections, num_layers: int, memory: PackedMemory) -> None:
        self._projections = projections
        self._num_layers = num_layers
        self._memory = memory

    def make(self, bits: DraftBits) -> None:
        """Make copies as far as the memory budget holds them, or drop them.

        `auto` makes those in 4 bits beside those in 8 only if the budget holds all.
        """
        wanted: DraftBits = bits if not self._projections.quantised_bytes or self.are_nested else "none"
        held = sum(copy.nbytes for linear in self._linears() for copy in linear.copies.values())
        both = self.most_bytes(bits) <= self._memory.limit - self._memory.used + held
        for linear in self._linears():
            linear.lighten(wanted, both)
        self._projections.use_huge_pages()

    def _linears(self) -> Iterator[Linear]:
        return (linear for _, linears in self._projections.by_sublayer() for linear in linears)

    @property
    def are_nested(self) -> bool:
        """Whether drafts read a part of a quantised file's weights instead of copies, and far fewer bytes."""
        whole = self._projections.quantised_bytes
        return whole > 0 and self._projections.draft_bytes <= MOST_NESTED * whole

    def most_bytes(self, bits: DraftBits) -> int:
        """Bytes that all copies would take at most; 0 if there can be none."""
        return sum(linear.light_bytes(bits, both=True) for linear in self._linears())

    @property
    def kernels(self) -> str:
        """The kernels of the copies with their numbers, such as `121 int8`; empty without copies."""
        names = Counter(
            kernel.name for linear in self._projections for copy in linear.copies.values() for kernel in copy.kernels
        )
        return ", ".join(f"{count} {name}" for name, count in sorted(names.items()))

    @property
    def obstacle(self) -> str:
        """The reason why there are no copies, and what to do (`Linear.obstacle`)."""
        return next(linear.obstacle for linear in self._projections)

    @property
    def bits_of_each(self) -> list[tuple[int, ...]]:
        """The copies' bits for each sub-layer and, last, for the head; the nearest to the model first."""
        found = [
            {bits for linear in linears for bits in linear.copies} for _, linears in self._projections.by_sublayer()
        ]
        return [tuple(bits for bits in BITS if bits in copies) for copies in found]

    @property
    def bits(self) -> tuple[int, ...]:
        """The bits of all copies, the nearest to the model first."""
        found = {bits for copies in self.bits_of_each for bits in copies}
        return tuple(bits for bits in BITS if bits in found)

    @property
    def mask(self) -> SubLayerPlan:
        """The draft that skips nothing and runs everything on the copies that are nearest to the model."""
        nearest = {index: copies[0] for index, copies in enumerate(self.bits_of_each) if copies}
        return SubLayerPlan.of(self._num_layers).lightened(nearest)

    @property
    def masks(self) -> Sequence[SubLayerPlan]:
        """The drafts that skip nothing and run everything in the same bits, as far as there are copies.

        That on the copies nearest to the model comes first.
        """
        nearest, copies = self.mask, list(enumerate(self.bits_of_each))
        found = (nearest.lightened({i: bits for i, has in copies if bits in has}) for bits in self.bits)
        return tuple(dict.fromkeys(found))


def _ranges(rows: Sequence[bool]) -> str:
    """The numbers of rows whose entry is true, such as `4-32`; the last entry holds beyond its end."""
    runs = list[str]()
    first = 1
    for served, run in groupby(rows):
        last = first + len(list(run)) - 1
        if served:
            runs.append(f"{first}+" if last == len(rows) else f"{first}-{last}")
        first = last + 1
    return ",".join(runs)
