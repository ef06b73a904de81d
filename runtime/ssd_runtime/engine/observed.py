"""The report of a cycle to an observer of its request."""

from __future__ import annotations

from dataclasses import dataclass

from ssd_runtime.planning.plan import Cycle, Planner


@dataclass(frozen=True, slots=True)
class Observation:
    """One cycle of a running request."""

    cycle: Cycle
    credit: float | None = None
    """Loss budget of `auto` after the cycle, in plain steps; None for other strategies."""
    spent: float = 0.0
    """Loss budget that the cycle used, in plain steps."""
    plain_seconds: float | None = None
    """Seconds that `auto` prices a plain step at, by the verifications that it timed; None for other strategies."""

    @classmethod
    def of(cls, cycle: Cycle, planner: Planner, before: float | None) -> Observation:
        """Report a cycle that `planner` has observed; it began the cycle with the loss budget `before`."""
        credit = credit_of(planner)
        spent = 0.0 if before is None or credit is None else max(0.0, before - credit)
        return cls(cycle, credit, spent, getattr(planner, "plain_seconds", None))


def credit_of(planner: Planner) -> float | None:
    """The planner's loss budget, in plain steps; None if it has none."""
    budget = getattr(planner, "budget", None)
    return None if budget is None else float(budget.credit)
