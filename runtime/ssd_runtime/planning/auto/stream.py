"""The state of `auto` for one stream of requests."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from statistics import median

from ssd_profiles.mask import SubLayerPlan
from ssd_runtime.drafting.lookup import LookupStats
from ssd_runtime.planning.auto.budget import Budgets
from ssd_runtime.planning.auto.draft_stats import OUTLIER, DraftStats
from ssd_runtime.planning.auto.shared_step import SharedSteps
from ssd_runtime.planning.auto.verify_stats import SETTLING, VerifyStats
from ssd_runtime.sequence.load import Load

SHARE = 0.1
"""Weight of a new time in the running mean."""


@dataclass(slots=True)
class PlanningTime:
    """Running mean of the seconds to plan and observe a cycle; at first the median of `SETTLING` cycles."""

    seconds: float = 0.0
    _first: list[float] = field(default_factory=list)
    """Seconds of the first cycles, one of which may have been held up by other processes."""

    def update(self, seconds: float) -> float:
        """Update with a cycle's seconds; returns those to charge: the mean, for the first cycles with the last."""
        if len(self._first) < SETTLING:
            self._first.append(seconds)
            self.seconds = median(self._first)
            return SETTLING * self.seconds if len(self._first) == SETTLING else 0.0
        self.seconds += SHARE * (min(seconds, OUTLIER * self.seconds) - self.seconds)
        return self.seconds


def _by_domain() -> defaultdict[str, DraftStats]:
    return defaultdict(DraftStats)


@dataclass(slots=True)
class Stream:
    """The state of `auto` for one stream; it outlives a request: this is the planner's declared state.

    Statistics are shared by all requests. A budget belongs to one request, so that concurrent ones never spend each
    other's credit.
    """

    lookup: LookupStats = field(default_factory=LookupStats)
    budgets: Budgets = field(default_factory=Budgets)
    planning: PlanningTime = field(default_factory=PlanningTime)
    verify: VerifyStats = field(default_factory=VerifyStats)
    masks: defaultdict[str, DraftStats] = field(default_factory=_by_domain)
    """Statistics of masked drafts by domain."""
    exits: defaultdict[str, DraftStats] = field(default_factory=_by_domain)
    """Statistics of early exits by domain."""
    light: defaultdict[SubLayerPlan, DraftStats] = field(default_factory=lambda: defaultdict(DraftStats))
    """Statistics of each draft on light copies of the weights, in all domains."""
    head: DraftStats = field(default_factory=DraftStats)
    """Statistics of drafts that score a part of the vocabulary, in all domains."""
    mtp: DraftStats = field(default_factory=DraftStats)
    """Statistics of drafts by the MTP layer, in all domains."""
    priced: tuple[Load, list[float]] | None = None
    """The latest shared forward, and the costs of 1, 2, … rows of a request in the next one."""
    timed: Load | None = None
    """The latest shared forward whose time is part of `verify`."""
    steps: SharedSteps = field(default_factory=SharedSteps)
    """The running requests, and their joint drafts."""
