"""The loss budget bounds the time that speculation loses, however few drafts are accepted."""

from __future__ import annotations

from dataclasses import dataclass

START = 1.5
"""Credit of a stream's first request, in plain steps."""
MOST = 4.0
"""Largest credit, in plain steps."""
PER_TOKEN = 1 / 64
"""Credit per token, in plain steps."""
START_PLANNING = 0.25
"""Allowance for planning of a stream's first request, in plain steps."""
MOST_PLANNING = 1.0
"""Largest allowance for planning, in plain steps."""
PLANNING_PER_TOKEN = 1 / 128
"""Allowance for planning per token, in plain steps."""


@dataclass(slots=True)
class Budget:
    """One request's allowances in plain steps: `credit` for rejected drafts, `planning` for the time of planning.

    A cycle is allowed only if `credit` covers its largest loss, all drafts rejected. It is planned only while
    `planning` is positive. Every token adds 1/64 and 1/128 of a plain step to them. A cycle's gain goes to `planning`
    until that is `START_PLANNING`, then to `credit`, and then to `planning` again; each has a limit. Neither falls
    below 0, except by the last planning, or a stream's first ones (`PlanningTime`). So over any T tokens speculation
    and planning lose at most `MOST` + `MOST_PLANNING` + 3 T / 128 plain steps together: 2.4% in the long run.
    `Budgets` keeps this bound over successive requests.
    """

    credit: float = START
    planning: float = START_PLANNING

    @property
    def most_cost(self) -> float:
        """Largest cost of a cycle, in plain steps: it may yield a single token."""
        return 1.0 + self.credit

    @property
    def covers_planning(self) -> bool:
        """Whether the next cycle may be planned; a plain step needs no plan."""
        return self.planning > 0.0

    def update(self, tokens: int, cost: float, planning: float = 0.0) -> None:
        """Update with a cycle's tokens, its cost and the cost of planning it, both in plain steps."""
        left = self.planning + tokens * PLANNING_PER_TOKEN - planning
        gain = max(0.0, tokens - cost)
        refill = min(gain, max(0.0, START_PLANNING - left))
        credit = self.credit + tokens * (1.0 + PER_TOKEN) - cost - refill
        # Gains beyond the largest credit pay for planning, which takes a larger share of a plain step under load.
        refill += min(gain - refill, max(0.0, credit - MOST))
        self.planning = min(MOST_PLANNING, left + refill)
        self.credit = min(MOST, credit)


@dataclass(slots=True)
class Budgets:
    """Budgets of ended requests, for new ones.

    A new request takes the mean of the budgets that were given back and not yet taken, and at most `START` credit.
    Nothing is taken twice. So the bound of `Budget` holds over any T tokens of successive requests, however short
    they are. With up to n requests at once, `MOST` + `MOST_PLANNING` counts n times.
    """

    waiting: int = 0
    """Number of budgets that were given back and not yet taken."""
    credit: float = 0.0
    """Sum of these budgets' credits."""
    planning: float = 0.0
    """Sum of these budgets' allowances for planning."""

    def take(self) -> Budget:
        """Take the budget that a new request starts with."""
        if not self.waiting:
            return Budget()
        credit = self.credit / self.waiting
        planning = self.planning / self.waiting
        self.waiting -= 1
        self.credit -= credit
        self.planning -= planning
        return Budget(min(START, credit), planning)

    def give_back(self, budget: Budget) -> None:
        """Receive the budget of a request that has ended."""
        self.waiting += 1
        self.credit += budget.credit
        self.planning += budget.planning
