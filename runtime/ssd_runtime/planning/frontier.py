"""Planning from a bundle's frontiers: a fixed domain, the nearest domain (KNN-SSD), or whatever is fastest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from ssd_artifacts.domain_record import MIXTURE, DomainRecord
from ssd_profiles.latency import LatencyTable
from ssd_runtime.guard import Guard
from ssd_runtime.planning.plan import PLAIN, BasePlanner, Cycle, PlainPlanner, Plan, Planner
from ssd_runtime.planning.settings import NearestSettings
from ssd_runtime.planning.throughput import Entry, Option, StepCosts, best_option
from ssd_runtime.routing import Router
from ssd_runtime.session import Prefill, Session

REPLAN_GROWTH = 1.1
"""The context grows by this factor, and by `REPLAN_TOKENS`, before masks are compared again."""
REPLAN_TOKENS = 64
MIN_GAIN = 1.02
"""Predicted speed-up below which speculation is not worth its risk."""


@dataclass(frozen=True, slots=True)
class Frontier:
    """A domain's masks, ready to choose from."""

    entries: tuple[Entry, ...]
    correction: float = 1.0
    """Measured ÷ predicted speed-up when the bundle was validated."""

    @classmethod
    def of(cls, record: DomainRecord, num_layers: int) -> Frontier:
        """The frontier of a bundle's record."""
        entries = tuple(
            Entry(f"{record.name}[{index}]", entry.skip_mask(num_layers), entry.profile())
            for index, entry in enumerate(record.frontier)
        )
        if record.validation is None or record.choice is None or record.choice.predicted_speedup <= 0.0:
            return cls(entries)
        return cls(entries, record.validation.speedup / record.choice.predicted_speedup)


@dataclass(slots=True)
class _Current:
    """The best option and the costs at the current context length, looked up again as it grows."""

    frontier: Frontier
    latency: LatencyTable
    option: Option | None = None
    costs: StepCosts = field(init=False)
    until: int = -1

    def at(self, context: int) -> Option | None:
        if context >= self.until:
            self.option = best_option(self.frontier.entries, self.latency, context)
            self.costs = StepCosts.at(self.latency, context)
            self.until = max(int(context * REPLAN_GROWTH), context + REPLAN_TOKENS)
        return self.option


class FixedPlanner(BasePlanner):
    """One domain's frontier for every prompt; the best of it by tokens a second at the current context length."""

    def __init__(self, frontier: Frontier, latency: LatencyTable) -> None:
        self._current = _Current(frontier, latency)

    def plan(self, context: int) -> Plan:
        """The frontier's best, or a plain step when the frontier is empty."""
        option = self._current.at(context)
        return PLAIN if option is None else _speculate(option, option.speedup)


class NearestAnchorPlanner(BasePlanner):
    """KNN-SSD: the frontier of the domain whose anchor is nearest to the prompt; strangers go where they are sent."""

    def __init__(
        self, frontiers: Mapping[str, Frontier], router: Router, latency: LatencyTable, settings: NearestSettings
    ) -> None:
        self._frontiers, self._router, self._latency, self._settings = frontiers, router, latency, settings
        self._chosen: Planner = PlainPlanner()

    def start(self, session: Session, prompt: Prefill) -> None:
        """Route the prompt."""
        route = self._router.route(prompt)
        self.domain = route.domain
        if not route.known and self._settings.strangers != "nearest":
            self.domain = MIXTURE if self._settings.strangers == "mix" else None
        frontier = self._frontiers.get(self.domain or "")
        self._chosen = PlainPlanner() if frontier is None else FixedPlanner(frontier, self._latency)

    def plan(self, context: int) -> Plan:
        """The best of that domain's frontier."""
        return self._chosen.plan(context)


class AutoPlanner(BasePlanner):
    """Speculates where that is predicted to be faster and turns out to be; decodes plainly otherwise.

    The nearest domain's frontier, or the mixture's for a prompt that is like no domain's. A domain's prediction is
    corrected by how validation compared with it when the bundle was made.
    """

    def __init__(self, frontiers: Mapping[str, Frontier], router: Router, latency: LatencyTable) -> None:
        self._frontiers, self._router, self._latency = frontiers, router, latency
        self._guard = Guard()
        self._current: _Current | None = None

    def start(self, session: Session, prompt: Prefill) -> None:
        """Route the prompt."""
        route = self._router.route(prompt)
        self.domain = route.domain if route.known else None
        frontier = self._frontiers.get(route.domain if route.known else MIXTURE)
        self._current = None if frontier is None else _Current(frontier, self._latency)

    def plan(self, context: int) -> Plan:
        """What is fastest at this context length, by prediction and by what the guard has measured."""
        if self._current is None:
            return Plan("plain: the prompt is like no domain of the bundle")
        option = self._current.at(context)
        if option is None:
            return Plan("plain: the domain has no masks")
        expected = option.speedup * self._current.frontier.correction
        if expected < MIN_GAIN:
            return Plan(f"plain: skipping is predicted to run at {expected:.2f}x")
        if self._guard.rest:
            return Plan("plain: speculation was measured to be slower, it is tried again later")
        return _speculate(option, expected)

    def observe(self, cycle: Cycle, states: list[Tensor] | None) -> None:
        """Let the guard judge the cycle."""
        if self._current is not None:
            costs = self._current.costs
            self._guard.observe(cycle, costs.plain, float(costs.verification(cycle.verified - 1)))


def _speculate(option: Option, expected: float) -> Plan:
    return Plan.masked(
        f"draft {option.draft_length} with {option.entry.name}: {expected:.2f}x predicted",
        option.entry.mask,
        option.draft_length,
        option.threshold,
        option.entry.name,
    )
