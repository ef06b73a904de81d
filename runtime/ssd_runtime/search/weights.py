"""Whole-number weights of the knapsack's items, from the latencies of sub-layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ssd_profiles.latency import LatencyTable
from ssd_profiles.mask import BITS, FULL

FINE = 16
"""Units of weight per full sub-layer of the fastest kind, where sub-layers may be light: savings of a few percent
must not round away."""

LightChoices = tuple[tuple[int, int], ...]
"""Pairs of bits and the weight that running an item in these bits saves."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Whole-number weights of the items that may be skipped."""

    items: tuple[int, ...]
    """One weight per item: per sub-layer (2L) or per layer (L)."""
    light: tuple[LightChoices, ...] = ()
    """Further choices for each sub-layer; empty if sub-layers are skipped or run in full, as in the paper."""
    head: int = FULL
    """Bits of the head's weights in all drafts."""

    @classmethod
    def of(cls, latency: LatencyTable, context: float) -> Weights:
        """The sub-layers' latencies, rounded in units of the fastest one's (KnapSpec §3.4)."""
        seconds = latency.sublayer_seconds(context, 1)
        unit = min(seconds)
        return cls(tuple(max(1, round(each / unit)) for each in seconds))

    @classmethod
    def fine(cls, latency: LatencyTable, context: float, copies: Sequence[Sequence[int]]) -> Weights:
        """Weights in finer units, with what each sub-layer saves on its copies (`LightCopies.bits_of_each`).

        The head uses the first precision of its list.
        """
        full = latency.sublayer_seconds(context, 1)
        unit = min(full) / FINE
        at_bits = {bits: latency.sublayer_seconds(context, 1, bits) for bits in BITS}
        saved = [{bits: round((each - at_bits[bits][i]) / unit) for bits in copies[i]} for i, each in enumerate(full)]
        return cls(
            items=tuple(max(1, round(each / unit)) for each in full),
            light=tuple(tuple((bits, gain) for bits, gain in each.items() if gain > 0) for each in saved),
            head=next(iter(copies[-1]), FULL),
        )

    def options(self, item: int) -> LightChoices:
        """The bits in which an item may run, with what each saves; in full first, which saves nothing."""
        return ((FULL, 0), *(self.light[item] if self.light else ()))
