"""The loss budget: a bound on what speculation costs, however badly drafts fare."""

from __future__ import annotations

from dataclasses import dataclass

START, MOST = 1.5, 4.0
PER_TOKEN = 1 / 64
START_PLANNING, MOST_PLANNING = 0.25, 1.0
PLANNING_PER_TOKEN = 1 / 128


@dataclass(slots=True)
class Budget:
    """One request's two purses in plain steps: `credit` for failed drafts, `planning` for the time that deciding takes.

    A cycle is allowed only when its greatest loss, all drafts rejected, is covered by `credit`, and is planned only
    while there is something left for `planning`. Every token puts a 64th and a 128th of a plain step into them. What a
    cycle gains goes to `planning` until that has what it starts with, then to `credit`, and then to `planning` again;
    each has a limit. Neither falls below 0, but for the last planning. So over any T tokens speculation and planning
    together lose at most `MOST` + `MOST_PLANNING` + 3 T / 128 plain steps: 2.4% in the long run. `Budgets` keeps this bound for requests that follow one another.
    """

    credit: float = START
    planning: float = START_PLANNING

    @property
    def most_cost(self) -> float:
        """Plain steps that a cycle may cost, since it may turn out to yield a single token."""
        return 1.0 + self.credit

    @property
    def covers_planning(self) -> bool:
        """Whether the next cycle may be planned; a plain step needs no plan."""
        return self.planning > 0.0

    def allows(self, cost: float) -> bool:
        """Whether a cycle may cost so many plain steps."""
        return cost <= self.most_cost

    def settle(self, tokens: int, cost: float, planning: float = 0.0) -> None:
        """Update with a cycle: tokens that it yielded, its cost and that of planning it, both in plain steps."""
        left = self.planning + tokens * PLANNING_PER_TOKEN - planning
        gain = max(0.0, tokens - cost)
        refill = min(gain, max(0.0, START_PLANNING - left))
        credit = self.credit + tokens * (1.0 + PER_TOKEN) - cost - refill
        # Gains that credit has no room for pay for planning: beside others it takes more of a plain step.
        refill += min(gain - refill, max(0.0, credit - MOST))
        self.planning = min(MOST_PLANNING, left + refill)
        self.credit = min(MOST, credit)


@dataclass(slots=True)
class Budgets:
    """Hands what ended requests were left with on to new ones.

    A new request takes the mean of the budgets that were given back and not yet taken, at most what the very first one
    starts with; nothing is handed on twice. So the bound of `Budget` holds over any T tokens of requests that follow
    one another, however short they are. Where up to n requests decode at once, `MOST` + `MOST_PLANNING` counts n times.
    """

    waiting: int = 0
    """Budgets that were given back and not yet taken."""
    credit: float = 0.0
    """Of all these together."""
    planning: float = 0.0
    """Of all these together."""

    def take(self) -> Budget:
        """The budget that a new request starts with."""
        if not self.waiting:
            return Budget()
        credit, planning = self.credit / self.waiting, self.planning / self.waiting
        self.waiting, self.credit, self.planning = self.waiting - 1, self.credit - credit, self.planning - planning
        return Budget(min(START, credit), planning)

    def give_back(self, budget: Budget) -> None:
        """Receive the budget of a request that has ended."""
        self.waiting += 1
        self.credit += budget.credit
        self.planning += budget.planning
