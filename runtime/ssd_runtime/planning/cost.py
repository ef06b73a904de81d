"""Expected tokens a second of drafting with a mask, from measured acceptance and measured latency."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ssd_profiles.acceptance import AcceptanceProfile
from ssd_profiles.latency import LatencyTable
from ssd_profiles.mask import SkipMask


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
    """Seconds of full forwards at one context length."""

    plain: float
    queries: NDArray[np.float64]
    curve: NDArray[np.float64]
    """A forward of each of `queries` tokens."""

    @classmethod
    def at(cls, latency: LatencyTable, context: int) -> StepCosts:
        """The table's figures at a context length."""
        curve = np.asarray([latency.step_seconds(context, n) for n in latency.queries])
        return cls(float(curve[0]), latency.queries, curve)

    def verification(self, drafted: NDArray[np.float64] | float) -> NDArray[np.float64]:
        """Verifying so many drafted tokens, the pending token included in the forward."""
        return np.interp(np.asarray(drafted) + 1.0, self.queries, self.curve)

    def rate(
        self, tokens: NDArray[np.float64] | float, steps: NDArray[np.float64] | float, draft: float
    ) -> NDArray[np.float64]:
        """Tokens a second of cycles of so many tokens and draft steps, `draft` seconds each, and a verification."""
        return np.asarray(tokens / (steps * draft + self.verification(steps)))

    def rows_in_plain_steps(self) -> list[float]:
        """What a verification of 1, 2, … rows costs, as far as it was measured, in plain steps."""
        rows = np.arange(1, int(self.queries[-1]) + 1)
        # More rows never cost less: what looks like it is noise of the measurement.
        costs: list[float] = np.maximum.accumulate(np.interp(rows, self.queries, self.curve) / self.plain).tolist()
        return costs


def under_load(costs: Sequence[float], sequences: int, others: int) -> list[float]:
    """What 1, 2, … rows of one sequence cost where `sequences` share a forward, with `others` rows of the others.

    `costs` are those of 1, 2, … rows in all; both in plain steps. Every sequence waits for the rows of each, and loses
    what it could have decoded meanwhile: a row costs what it adds to the shared step, times the number of sequences.
    """
    alone = cost_of(costs, others + 1)
    return [1.0 + sequences * (cost_of(costs, others + n) / alone - 1.0) for n in range(1, len(costs) + 1)]


def cost_of(costs: Sequence[float], rows: int) -> float:
    """The cost of any number of rows; beyond those measured it goes on as between the last eight."""
    if rows <= len(costs):
        return costs[rows - 1]
    slope = (costs[-1] - costs[-9]) / 8 if len(costs) > 8 else costs[-1] / len(costs)
    return costs[-1] + slope * (rows - len(costs))


def best_option(entries: Sequence[Entry], latency: LatencyTable, context: int) -> Option | None:
    """The (mask, draft length, threshold) of most tokens a second; None without entries.

    KnapSpec's TPT (eq. 4) with two differences: tokens and draft steps a cycle are those of the acceptance
    profile, and a verification costs what was measured for that many tokens, not one plain step.
    """
    costs = StepCosts.at(latency, context)
    best: Option | None = None
    for entry in entries:
        profile = entry.profile
        draft = latency.step_seconds(context, 1, entry.mask)
        rate = costs.rate(profile.tokens, profile.steps, draft)
        row, column = np.unravel_index(int(rate.argmax()), rate.shape)
        speed = float(rate[row, column])
        if best is None or speed > best.tokens_per_second:
            length, threshold = profile.draft_lengths[row], profile.thresholds[column]
            best = Option(entry, length, threshold, speed, speed * costs.plain, draft / costs.plain)
    return best
