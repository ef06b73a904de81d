"""A watched planner plans as the one it wraps, and every cycle is reported with what it took of the loss budget."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ssd_runtime.drafting.successors import Successors
from ssd_runtime.engine.observed import Observation, ObservedPlanner
from ssd_runtime.planning.auto.budget import Budget
from ssd_runtime.planning.plan import PLAIN, BasePlanner, Cycle, PlainPlanner, Plan
from ssd_runtime.sequence.prefill import Prefill
from ssd_runtime.sequence.session import Session


def cycle(tokens: int) -> Cycle:
    return Cycle(
        plan=PLAIN,
        context=9,
        drafted=4,
        accepted=tokens - 1,
        tokens=[1] * tokens,
        verified=5,
        draft_seconds=0.0,
        verify_seconds=0.1,
    )


@dataclass
class Spending(BasePlanner):
    """Routes to a domain, changes its table with every plan, and pays three plain steps per cycle."""

    budget: Budget = field(default_factory=Budget)
    calls: list[str] = field(default_factory=list)

    def start(self, session: Session, prompt: Prefill) -> None:
        self.domain = "rivers"

    def plan(self, context: int) -> Plan:
        self.successors = Successors()
        return PLAIN

    def observe(self, cycle: Cycle, states: list[Tensor] | None) -> None:
        self.budget.update(len(cycle.tokens), cost=3.0)

    def finish(self) -> None:
        self.calls.append("finish")


def test_cycles_are_reported_with_the_budget_they_took() -> None:
    seen = list[Observation]()
    planner = Spending()
    watched = ObservedPlanner(planner, seen.append)
    nothing: Any = None
    watched.start(nothing, nothing)
    assert watched.domain == "rivers"
    assert watched.plan(9) is PLAIN
    assert watched.successors is planner.successors is not None
    before = planner.budget.credit
    watched.observe(cycle(2), None)
    after = planner.budget.credit
    watched.observe(cycle(5), None)
    watched.finish()
    assert [len(each.cycle.tokens) for each in seen] == [2, 5]
    assert seen[0].spent == before - after > 0
    assert (seen[0].credit, seen[1].credit) == (after, planner.budget.credit)
    assert seen[1].spent == 0.0, "a cycle that gains takes nothing"
    assert planner.calls == ["finish"]


def test_planners_without_a_budget_are_reported_too() -> None:
    seen = list[Observation]()
    ObservedPlanner(PlainPlanner(), seen.append).observe(cycle(1), None)
    assert (seen[0].credit, seen[0].spent) == (None, 0.0)
