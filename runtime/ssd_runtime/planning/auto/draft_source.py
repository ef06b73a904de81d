"""The interface between the controller and the ways to draft by steps of the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Protocol

from ssd_runtime.planning.auto.draft_stats import MIN_GAIN, DraftStats
from ssd_runtime.planning.plan import Cycle, Plan


@dataclass(frozen=True, slots=True)
class DraftProposal:
    """Drafts that the model could make in the next cycle."""

    source: DraftSource
    best: float
    """Expected speed-up against plain decoding at the best length, whether the budget covers that or not."""
    plan: Plan | None = None
    """The best plan that the budget covers; None if it covers none that gains."""
    speedup: float = 0.0
    """Expected speed-up of the plan."""


@dataclass(frozen=True, slots=True)
class DraftLength:
    """A length of chains with its expected speed-up."""

    speedup: float
    length: int
    cost: float
    """Cost of a cycle whose drafts are all rejected, in plain steps."""


def best_covered(lengths: Sequence[DraftLength], most_cost: float) -> DraftLength | None:
    """The length with the highest speed-up among those that gain and cost at most `most_cost`; None without one."""
    covered = [each for each in lengths if each.cost <= most_cost and each.speedup >= MIN_GAIN]
    return max(covered, key=attrgetter("speedup"), default=None)


class DraftSource(Protocol):
    """A way to draft by steps of the model, for one request."""

    @property
    def stats(self) -> DraftStats:
        """Statistics of these drafts in this stream."""
        ...

    def propose(self, context: int, costs: Sequence[float], most_cost: float) -> DraftProposal | None:
        """Propose the best draft after `context` committed tokens; None if no length is expected to gain.

        costs[n] is the cost of verifying n drafts and `most_cost` the largest cost of the cycle, both in plain steps.
        """
        ...

    def observe(self, cycle: Cycle, costs: Sequence[float], plain_seconds: float | None) -> float:
        """Update with the cycle of the latest proposal; returns the cycle's cost in plain steps.

        `costs` are those of `propose`. `plain_seconds` are the current seconds of a plain step, or None if unknown.
        """
        ...
