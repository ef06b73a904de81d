"""What forwards take on a device, and what cycles of tokens and steps are worth: time is weighed here alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ssd_profiles.acceptance import AcceptanceProfile
from ssd_profiles.latency import LatencyTable
from ssd_profiles.mask import SkipMask
from ssd_runtime.planning.by_context import ByContext

MOST_ROWS = 32
"""Rows of one sequence's verification that are priced: no draft has more."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A mask to choose from, with what its drafts yield."""

    name: str
    mask: SkipMask
    profile: AcceptanceProfile


@dataclass(frozen=True, slots=True)
class Option:
    """The best way to draft at one context length."""

    entry: Entry
    draft_length: int
    threshold: float
    tokens_per_second: float
    speedup: float
    """Against plain decoding at the same context length, by the same latency table."""
    draft_cost: float
    """A draft step, in plain steps."""


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds of full forwards of one sequence at one context length."""

    plain: float
    queries: NDArray[np.float64]
    curve: NDArray[np.float64]
    """A forward of each of `queries` tokens."""

    def verification(self, drafted: NDArray[np.float64] | float) -> NDArray[np.float64]:
        """Verifying so many drafted tokens, the pending token included in the forward."""
        return np.interp(np.asarray(drafted) + 1.0, self.queries, self.curve)

    def rate(
        self, tokens: NDArray[np.float64] | float, steps: NDArray[np.float64] | float, draft: float
    ) -> NDArray[np.float64]:
        """Tokens a second of cycles of so many tokens and draft steps, `draft` seconds each, and a verification."""
        return np.asarray(tokens / (steps * draft + self.verification(steps)))


class Corrections(Protocol):
    """What verifications take here and now, beside what the latency table says."""

    def priced(self, costs: Sequence[float], first: int = 1) -> list[float]:
        """The table's costs of `first`, `first` + 1, … rows, corrected; more rows never cost less."""
        ...


class CostModel:
    """Answers what a forward of so many rows takes at a context length, alone or under load, and what a cycle is worth.

    It goes by a latency table and, where given, by a stream's corrections. Costs are in plain steps: seconds ÷ those
    of a forward of one row of one sequence at the same context. An object serves one request, whose context grows.
    """

    def __init__(self, latency: LatencyTable, corrections: Corrections | None = None) -> None:
        self.latency, self._corrections = latency, corrections
        self._plain = ByContext(latency.step_seconds)
        self._joint = dict[int, float]()
        """By sequences, in seconds."""
        self._alone = ByContext(lambda context: self._curve(context, MOST_ROWS))
        # Only where sequences share steps: it takes longer.
        self._shared = ByContext(lambda context: self._curve(context, latency.most_queries))

    def at(self, context: float) -> StepCosts:
        """Seconds of full forwards of a sequence that is alone, at any context length."""
        return self._at(context, MOST_ROWS)

    def tokens_per_second(self, context: float, tokens: float, steps: float, mask: SkipMask | None = None) -> float:
        """What a cycle of so many tokens brings that takes `steps` draft steps with `mask` and a verification.

        KnapSpec's TPT (eq. 4), but that a verification takes what was measured for its rows, not one plain step.
        """
        draft = self.latency.step_seconds(context, 1, mask) if steps else 0.0
        return float(self.at(context).rate(tokens, steps, draft))

    def best_option(self, entries: Sequence[Entry], context: float) -> Option | None:
        """The (mask, draft length, threshold) of most tokens a second; None without entries.

        Tokens and draft steps per cycle are those of the acceptance profile.
        """
        costs = self.at(context)
        best: Option | None = None
        for entry in entries:
            profile = entry.profile
            draft = self.latency.step_seconds(context, 1, entry.mask)
            rate = costs.rate(profile.tokens, profile.steps, draft)
            row, column = np.unravel_index(int(rate.argmax()), rate.shape)
            speed = float(rate[row, column])
            if best is None or speed > best.tokens_per_second:
                best = Option(
                    entry=entry,
                    draft_length=profile.draft_lengths[row],
                    threshold=profile.thresholds[column],
                    tokens_per_second=speed,
                    speedup=speed * costs.plain,
                    draft_cost=draft / costs.plain,
                )
        return best

    def rows(self, context: int) -> list[float]:
        """What verifications of 1, 2, … rows of a sequence that is alone cost."""
        costs = self._alone.at(context)
        return costs if self._corrections is None else self._corrections.priced(costs)

    def rows_under_load(self, context: int, sequences: int, others: int) -> list[float]:
        """What 1, 2, … rows of one sequence cost where `sequences` share a forward, with `others` rows of the others.

        Here a plain step is a forward that has one row of this sequence. Every sequence waits for the rows of each, and
        loses what it could have decoded meanwhile: a row costs what it adds to the shared step, times the sequences.
        """
        costs = self.shared_rows(context, sequences, others)
        return [1.0 + sequences * (cost / costs[0] - 1.0) for cost in costs]

    def shared_rows(self, context: int, sequences: int, others: int) -> list[float]:
        """What forwards of `others` + 1, `others` + 2, … rows of so many sequences cost."""
        curve, count = self._shared.at(context), len(self._alone.at(context))
        costs = curve[others : others + count]
        costs += [cost_of(curve, others + n) for n in range(len(costs) + 1, count + 1)]
        if self._corrections is not None:
            costs = self._corrections.priced(costs, others + 1)
        extra = self._extra(context, sequences)
        return [cost + extra for cost in costs]

    def shared_step(self, context: int, rows: int, sequences: int = 1) -> float:
        """What a forward of so many rows in all costs, by the table alone."""
        if sequences == 1:
            return cost_of(self._alone.at(context), rows)
        return cost_of(self._shared.at(context), rows) + self._extra(context, sequences)

    def draft_step(self, context: int, mask: SkipMask, sequences: int) -> float:
        """What one step of the masked model for so many sequences costs, a row each."""
        return self.latency.step_seconds(context, sequences, mask, sequences) / self._plain.at(context)

    def prefixes(self, context: int, layers: int, most_rows: int) -> list[float]:
        """What 1, 2, …, `most_rows` rows cost in the first `layers` layers."""
        plain = self._plain.at(context)
        rows = (sum(self.latency.sublayer_seconds(context, n)[: 2 * layers]) for n in range(1, most_rows + 1))
        # More rows never take less: what looks like it is noise.
        return list(accumulate((seconds / plain for seconds in rows), max))

    def looks(self, context: int, count: int) -> float:
        """What `count` looks at the head cost, and what a step takes besides."""
        table = self.latency
        return (count * table.head_seconds(1) + max(0.0, table.overhead_seconds(1))) / self._plain.at(context)

    def _extra(self, context: int, sequences: int) -> float:
        """What so many sequences add beside their rows."""
        if sequences not in self._joint:
            self._joint[sequences] = self.latency.joint_seconds(sequences)
        return self._joint[sequences] / self._plain.at(context)

    def _at(self, context: float, most: int) -> StepCosts:
        """At the rows that were measured, up to `most` or the next more."""
        known = np.concatenate([self.latency.queries, self.latency.wide_queries])
        queries = known[: int(np.searchsorted(known, most)) + 1]
        curve = np.asarray([self.latency.step_seconds(context, n) for n in queries])
        return StepCosts(float(curve[0]), queries, curve)

    def _curve(self, context: float, most: int) -> list[float]:
        """What forwards of 1, 2, … rows cost by the table, as far as it was measured, up to `most`."""
        costs = self._at(context, most)
        drafted = np.arange(min(most, self.latency.most_queries), dtype=np.float64)
        # More rows never cost less: what looks like it is noise of the measurement.
        curve: list[float] = np.maximum.accumulate(costs.verification(drafted) / costs.plain).tolist()
        return curve


def cost_of(costs: Sequence[float], rows: int) -> float:
    """The cost of any number of rows; beyond those measured it goes on as between the last eight.

    It rises there no more slowly than on average before: noise may have flattened the end, but no row is free.
    """
    if rows <= len(costs):
        return costs[rows - 1]
    slope = costs[-1] / len(costs)
    if len(costs) > 8:
        slope = max((costs[-1] - costs[-9]) / 8, (costs[-1] - costs[0]) / (len(costs) - 1))
    return costs[-1] + slope * (rows - len(costs))
