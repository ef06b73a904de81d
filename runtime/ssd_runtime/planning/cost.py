"""Cost of forwards on a device, in seconds and in plain steps, and the rate of drafting options in tokens/s."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ssd_artifacts.domain_config import FrontierEntry
from ssd_profiles.acceptance import AcceptanceProfile
from ssd_profiles.latency import LatencyTable
from ssd_profiles.mask import SubLayerPlan
from ssd_runtime.planning.by_context import ByContext

PRICED_ROWS = 32
"""Rows up to which a lone sequence's verification is priced. No draft that is chosen by its price has more."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A mask of a frontier with its acceptance profile."""

    name: str
    mask: SubLayerPlan
    profile: AcceptanceProfile

    @classmethod
    def of(cls, stored: FrontierEntry, num_layers: int, name: str = "") -> Entry:
        """The entry of a bundle's frontier. Raises ValueError when its mask is not one of `num_layers` layers."""
        return cls(name or stored.mask, stored.sub_layer_plan(num_layers), stored.profile())


@dataclass(frozen=True, slots=True)
class Option:
    """The best way to draft at one context length."""

    entry: Entry
    draft_length: int
    threshold: float
    tokens_per_second: float
    speedup: float
    """Tokens/s ÷ those of plain decoding at the same context length, by the same latency table."""
    draft_cost: float
    """Cost of a draft step, in plain steps."""


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds of full forwards of one sequence at one context length."""

    plain: float
    """Seconds of a forward of one row."""
    queries: NDArray[np.float64]
    """Measured numbers of rows, ascending."""
    curve: NDArray[np.float64]
    """Seconds of a forward of each of `queries` rows."""

    def verification(self, drafted: NDArray[np.float64] | float) -> NDArray[np.float64]:
        """Seconds to verify `drafted` tokens; the forward has the pending token's row besides."""
        return np.interp(np.asarray(drafted) + 1.0, self.queries, self.curve)

    def rate(
        self, tokens: NDArray[np.float64] | float, steps: NDArray[np.float64] | float, draft: float
    ) -> NDArray[np.float64]:
        """Tokens/s of cycles of `tokens` tokens, `steps` draft steps of `draft` seconds each, and a verification."""
        return np.asarray(tokens / (steps * draft + self.verification(steps)))


class Corrections(Protocol):
    """Corrections of the latency table by the verifications that were timed lately."""

    def priced(self, costs: Sequence[float], first: int = 1) -> list[float]:
        """Corrected costs of `first`, `first` + 1, … rows, from the table's `costs`; more rows never cost less."""
        ...


class CostModel:
    """The cost of a forward of any number of rows at a context length, alone or under load, and the rate of a cycle.

    It uses a latency table and, if given, a stream's corrections. Costs are in plain steps: seconds ÷ those of a
    forward of one row of one sequence at the same context. An object serves one request, whose context grows.
    """

    def __init__(self, latency: LatencyTable, corrections: Corrections | None = None) -> None:
        self.latency = latency
        self._corrections = corrections
        self._plain = ByContext(latency.step_seconds)
        self._alone = ByContext(lambda context: self._curve(context, PRICED_ROWS))
        self._shared = dict[int, ByContext[list[float]]]()
        """Costs of 1, 2, … rows of all sequences, by their number."""

    def at(self, context: float, most: int = PRICED_ROWS, sequences: int = 1) -> StepCosts:
        """Seconds of full forwards of sequences at the measured numbers of rows, the last at least `most`."""
        known = np.concatenate([self.latency.queries, self.latency.wide_queries])
        queries = known[: int(np.searchsorted(known, most)) + 1]
        curve = np.asarray([self.latency.step_seconds(context, n, sequences=sequences) for n in queries])
        return StepCosts(float(curve[0]), queries, curve)

    def plain_seconds(self, context: int) -> float:
        """Seconds of a plain step of a lone sequence, by the table."""
        return self._plain.at(context)

    def tokens_per_second(self, context: float, tokens: float, steps: float, mask: SubLayerPlan | None = None) -> float:
        """Tokens/s of a cycle of `tokens` tokens that takes `steps` draft steps with `mask` and a verification.

        This is KnapSpec's TPT (eq. 4), except that a verification takes the time measured for its rows, not that of
        one plain step.
        """
        draft = self.latency.step_seconds(context, 1, mask) if steps else 0.0
        return float(self.at(context).rate(tokens, steps, draft))

    def best_option(self, entries: Sequence[Entry], context: float) -> Option | None:
        """The (mask, draft length, threshold) with the most tokens/s; None without entries.

        Tokens and draft steps per cycle come from the acceptance profile.
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
        """Costs of verifications of 1, 2, … rows of a lone sequence."""
        costs = self._alone.at(context)
        return costs if self._corrections is None else self._corrections.priced(costs)

    def rows_under_load(self, context: int, sequences: int, others: int) -> list[float]:
        """Costs of 1, 2, … rows of one of `sequences` sequences, whose shared forward has `others` other rows.

        The unit is a shared forward that has one row of this sequence. Every sequence waits for all rows and could have
        decoded meanwhile. So a row costs the time that it adds to the shared step, times the number of sequences.
        """
        costs = self.shared_rows(context, sequences, others)
        return [1.0 + sequences * (cost / costs[0] - 1.0) for cost in costs]

    def shared_rows(self, context: int, sequences: int, others: int) -> list[float]:
        """Costs of forwards of `others` + 1, `others` + 2, … rows of `sequences` sequences of a mean `context`."""
        curve = self._shared_curve(context, sequences)
        count = len(self._alone.at(context))
        costs = curve[others : others + count]
        costs += [cost_of(curve, others + n) for n in range(len(costs) + 1, count + 1)]
        return costs if self._corrections is None else self._corrections.priced(costs, others + 1)

    def shared_step(self, context: int, rows: int, sequences: int = 1) -> float:
        """Cost of a forward of `rows` rows in all, by the table alone; `context` is the mean of the sequences'."""
        return cost_of(self._alone.at(context) if sequences == 1 else self._shared_curve(context, sequences), rows)

    def draft_step(self, context: int, mask: SubLayerPlan, sequences: int) -> float:
        """Cost of one step of the masked model with a row of each of `sequences` sequences."""
        seconds = self.latency.step_seconds(context, queries=sequences, mask=mask, sequences=sequences)
        return seconds / self._plain.at(context)

    def prefixes(self, context: int, layers: int, most_rows: int) -> list[float]:
        """Costs of 1, 2, …, `most_rows` rows in the first `layers` layers."""
        plain = self._plain.at(context)
        rows = (sum(self.latency.sublayer_seconds(context, n)[: 2 * layers]) for n in range(1, most_rows + 1))
        # More rows never take less time; where the table says so, it is noise.
        return list(accumulate((seconds / plain for seconds in rows), max))

    def heads(self, context: int, count: int) -> float:
        """Cost of `count` passes of a draft's row through the head, and of a step's overhead."""
        table = self.latency
        return (count * table.draft_head_seconds(1) + max(0.0, table.overhead_seconds(1))) / self._plain.at(context)

    def _shared_curve(self, context: int, sequences: int) -> list[float]:
        """Costs of forwards of 1, 2, … rows of all sequences together, as long as the table's."""
        if sequences not in self._shared:
            most = self.latency.most_queries
            self._shared[sequences] = ByContext(lambda context: self._curve(context, most, sequences))
        return self._shared[sequences].at(context)

    def _curve(self, context: float, most: int, sequences: int = 1) -> list[float]:
        """Costs of forwards of 1, 2, … rows by the table, up to `most` or the largest number measured."""
        costs = self.at(context, most, sequences)
        drafted = np.arange(min(most, self.latency.most_queries), dtype=np.float64)
        # More rows never take less time; where the table says so, it is noise.
        plain = costs.plain if sequences == 1 else self.latency.step_seconds(context)
        curve: list[float] = np.maximum.accumulate(costs.verification(drafted) / plain).tolist()
        return curve


def cost_of(costs: Sequence[float], rows: int) -> float:
    """The cost of `rows` rows; beyond the measured ones it rises with the slope of the last eight.

    The slope there is at least the average one before: noise may have flattened the end, but no row is free.
    """
    if rows <= len(costs):
        return costs[rows - 1]
    slope = costs[-1] / len(costs)
    if len(costs) > 8:
        slope = max((costs[-1] - costs[-9]) / 8, (costs[-1] - costs[0]) / (len(costs) - 1))
    return costs[-1] + slope * (rows - len(costs))
