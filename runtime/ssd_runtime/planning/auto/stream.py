"""What `auto` learns from one stream of requests."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from ssd_runtime.drafting.lookup import LookupStats
from ssd_runtime.engine.session import Load
from ssd_runtime.planning.auto.budget import Budgets
from ssd_runtime.planning.auto.draft_stats import DraftStats
from ssd_runtime.planning.auto.planning_time import PlanningTime
from ssd_runtime.planning.auto.shared_step import SharedSteps
from ssd_runtime.planning.auto.verify_stats import VerifyStats


def _by_domain() -> defaultdict[str, DraftStats]:
    return defaultdict(DraftStats)


@dataclass(slots=True)
class Stream:
    """What `auto` has learned from one stream of requests; it outlives a request: this planner's declared state.

    Statistics are of all requests together. A budget is of one request alone: two that decode at once never spend each
    other's credit.
    """

    lookup: LookupStats = field(default_factory=LookupStats)
    budgets: Budgets = field(default_factory=Budgets)
    planning: PlanningTime = field(default_factory=PlanningTime)
    verify: VerifyStats = field(default_factory=VerifyStats)
    masks: defaultdict[str, DraftStats] = field(default_factory=_by_domain)
    exits: defaultdict[str, DraftStats] = field(default_factory=_by_domain)
    priced: tuple[Load, list[float]] | None = None
    """The latest shared forward, and what rows of the next one cost."""
    steps: SharedSteps = field(default_factory=SharedSteps)
    """The requests that are running, and what they do together."""
