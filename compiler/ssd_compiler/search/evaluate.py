"""Rates masks by predicted tokens/s."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from time import perf_counter

from ssd_compiler.progress import Tick
from ssd_profiles.acceptance import AcceptanceProfile, Trace
from ssd_profiles.latency import LatencyTable
from ssd_profiles.mask import BITS, FULL, SubLayerPlan
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.planning.cost import CostModel, Entry, Option
from ssd_runtime.search.replay import ReferenceStates, replay_mask

FAR_BEHIND = 0.9
"""A mask slower than this share of the best one, on the first sequences, is not looked at further."""


@dataclass(frozen=True, slots=True)
class Rated:
    """A mask, what its drafts yield, and the best way to draft with it."""

    mask: SubLayerPlan
    origin: str
    option: Option
    traces: tuple[Trace, ...]
    speedup: float
    """Predicted, against plain decoding on all calibration rows."""
    complete: bool = True
    """Whether all of them were looked at."""


@dataclass(slots=True)
class Evaluator:
    """Predicted tokens/s of masks, from one parallel pass of each over the calibration rows.

    A mask is evaluated once. `most` bounds the evaluations and `deadline` (of `perf_counter`) the time; `forwards`
    counts work in full forwards of all calibration rows, `progress` the seconds since `began` and the best predicted
    speed-up, whenever that rose.
    """

    decoder: Decoder
    reference: ReferenceStates
    latency: LatencyTable
    context: int
    block: int
    most: int
    deadline: float
    tick: Tick
    look: int = 1
    """Least sequences that a mask is replayed on before it may be set aside."""
    began: float = field(default_factory=perf_counter)
    rated: dict[SubLayerPlan, Rated] = field(default_factory=dict)
    forwards: float = 0.0
    progress: list[tuple[float, float]] = field(default_factory=list)
    usual: SubLayerPlan = field(init=False)
    """The draft that skips nothing, on the model's light copies if it has any."""
    _copies: Sequence[tuple[int, ...]] = field(init=False)
    """The bits of the copies of each sub-layer and, last, of the head."""

    def __post_init__(self) -> None:
        # Both are gathered from every projection of the model, and a search asks for them thousands of times.
        self.usual = self.decoder.light.mask
        self._copies = self.decoder.light.bits_of_each

    def precisions(self, sublayers: Collection[int]) -> list[int]:
        """The bits that all of these sub-layers may have besides the usual ones; 2L is the head."""
        usual = {self.usual.bits_of(index) for index in sublayers}
        common = [bits for bits in BITS if all(bits in self._copies[index] for index in sublayers)]
        return [bits for bits in (*common, FULL) if usual != {bits}]

    @property
    def exhausted(self) -> bool:
        """Whether no more masks may be evaluated."""
        return len(self.rated) >= self.most or perf_counter() > self.deadline

    def rate(self, mask: SubLayerPlan, origin: str) -> Rated:
        """Evaluate a mask, or recall it.

        A mask that is much slower than the best one on the first sequences is not evaluated on the others. Masks
        without light sub-layers are compared with their like, since other devices may have no light copies.
        """
        known = self.rated.get(mask)
        if known is not None:
            return known
        first, others = self.reference.split(max(self.look, len(self.reference.groups) // 4))
        traces = self._replayed(mask, first)
        rated = self._far_behind(mask, origin, traces) if others.groups else None
        if rated is None:
            traces += self._replayed(mask, others) if others.groups else []
            option = self._option(mask, traces)
            rated = Rated(mask, origin, option, tuple(traces), option.speedup)
        self.rated[mask] = rated
        if rated.complete and (not self.progress or rated.speedup > self.progress[-1][1]):
            self.progress.append((perf_counter() - self.began, rated.speedup))
        self.tick()
        return rated

    def _far_behind(self, mask: SubLayerPlan, origin: str, traces: Sequence[Trace]) -> Rated | None:
        """Rate the mask by the `traces` of the first sequences; None if it is not much slower there than the best one.

        These may be easier to draft than the others. So its speed-up is the best one's on all sequences, lowered by as
        much as the mask is slower on the first ones.
        """
        alike = [each for each in self.rated.values() if each.complete and bool(each.mask.light) == bool(mask.light)]
        if not alike:
            return None
        best = max(alike, key=lambda each: each.option.tokens_per_second)
        option = self._option(mask, traces)
        share = option.speedup / self._option(best.mask, best.traces[: len(traces)]).speedup
        if share >= FAR_BEHIND:
            return None
        return Rated(mask, origin, option, tuple(traces), share * best.speedup, complete=False)

    def _replayed(self, mask: SubLayerPlan, reference: ReferenceStates) -> list[Trace]:
        """Replay the mask on a part of the calibration rows; returns a trace for each sequence."""
        kept = len(mask) - mask.first_changed - len(list(mask))
        self.forwards += kept / len(mask) * len(reference) / len(self.reference)
        return replay_mask(self.decoder, reference, mask, self.block)

    def _option(self, mask: SubLayerPlan, traces: Sequence[Trace]) -> Option:
        """The best way to draft with a mask, by what it drafted."""
        entry = Entry(mask.hex(), mask, AcceptanceProfile.of_traces(traces))
        option = CostModel(self.latency).best_option([entry], self.context)
        assert option is not None
        return option

    def rate_all(self, masks: Iterable[SubLayerPlan], origin: str, until: float = float("inf")) -> list[Rated]:
        """Evaluate masks until nothing is left of the bounds, or `until` a moment of `perf_counter`."""
        found = []
        for mask in masks:
            if self.exhausted or perf_counter() > until:
                break
            found.append(self.rate(mask, origin))
        return found

    def best(self) -> Rated:
        """The mask with the most predicted tokens/s so far."""
        complete = (rated for rated in self.rated.values() if rated.complete)
        return max(complete, key=lambda rated: rated.option.tokens_per_second)
