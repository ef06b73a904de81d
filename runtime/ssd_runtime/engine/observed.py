"""A planner that reports every cycle of its request to a callback."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ssd_runtime.drafting.successors import Successors
from ssd_runtime.model.runner import Work
from ssd_runtime.planning.plan import Cycle, Plan, Planner
from ssd_runtime.sequence.prefill import Prefill
from ssd_runtime.sequence.session import Session


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


class ObservedPlanner(Planner):
    """Wraps `planner` and passes every cycle to `on_cycle`, also of requests that are cancelled later."""

    def __init__(self, planner: Planner, on_cycle: Callable[[Observation], None]) -> None:
        self._planner = planner
        self._on_cycle = on_cycle
        self.domain: str | None = planner.domain
        self.successors: Successors | None = planner.successors
        self._credit: float | None = None

    @property
    def wants_states(self) -> bool:
        """Whether the planner needs the hidden states of the next verification."""
        return self._planner.wants_states

    def start(self, session: Session, prompt: Prefill) -> None:
        """Start the planner."""
        self._planner.start(session, prompt)
        self.domain = self._planner.domain
        self.successors = self._planner.successors
        self._credit = self._credit_now()

    def searching(self, context: int) -> Work[None]:
        """Run the planner's searches."""
        return self._planner.searching(context)

    def plan(self, context: int) -> Plan:
        """The planner's plan."""
        plan = self._planner.plan(context)
        self.successors = self._planner.successors
        return plan

    def observe(self, cycle: Cycle, states: list[Tensor] | None) -> None:
        """Let the planner learn from a cycle, then report it."""
        self._planner.observe(cycle, states)
        before = self._credit
        self._credit = self._credit_now()
        spent = 0.0 if before is None or self._credit is None else max(0.0, before - self._credit)
        plain = getattr(self._planner, "plain_seconds", None)
        self._on_cycle(Observation(cycle, self._credit, spent, plain))

    def finish(self) -> None:
        """Finish the planner."""
        self._planner.finish()

    def _credit_now(self) -> float | None:
        """The budget of a planner that has one."""
        budget = getattr(self._planner, "budget", None)
        return None if budget is None else float(budget.credit)
