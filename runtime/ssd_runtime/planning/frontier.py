"""Planning from a bundle's frontiers: a fixed domain, the nearest domain (KNN-SSD), or whatever is fastest."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ssd_artifacts.bundle import Bundle
from ssd_artifacts.domain_record import DomainRecord
from ssd_profiles.latency import LatencyTable
from ssd_runtime.guard import Guard
from ssd_runtime.planning.plan import PLAIN, BasePlanner, Cycle, Plan
from ssd_runtime.planning.throughput import Option, best_option, entries_of
from ssd_runtime.routing import Router
from ssd_runtime.session import Prefill, Session

REPLAN_GROWTH = 1.1
"""The context grows by this factor, or by `REPLAN_TOKENS`, before masks are compared again."""
REPLAN_TOKENS = 64
MIN_GAIN = 1.02
"""Predicted speed-up below which speculation is not worth its risk."""


@dataclass(slots=True)
class _Current:
    """The option in force, and up to which context length it is."""

    option: Option | None = None
    until: int = -1

    def at(self, context: int, record: DomainRecord, latency: LatencyTable, num_layers: int) -> Option | None:
        if context >= self.until:
            self.option = best_option(entries_of(record, num_layers), latency, context)
            self.until = max(int(context * REPLAN_GROWTH), context + REPLAN_TOKENS)
        return self.option


class FixedPlanner(BasePlanner):
    """One domain's frontier for every prompt; the best of it by tokens a second at the current context length."""

    def __init__(self, record: DomainRecord, latency: LatencyTable, num_layers: int) -> None:
        self._record, self._latency, self._num_layers = record, latency, num_layers
        self._current = _Current()

    def plan(self, context: int) -> Plan:
        """The frontier's best, or a plain step when the frontier is empty."""
        option = self._current.at(context, self._record, self._latency, self._num_layers)
        return PLAIN if option is None else _speculate(option)


class NearestAnchorPlanner(BasePlanner):
    """KNN-SSD: the frontier of the domain whose anchor is nearest to the prompt."""

    def __init__(self, bundle: Bundle, router: Router, latency: LatencyTable) -> None:
        self._bundle, self._router, self._latency = bundle, router, latency
        self._fixed: FixedPlanner | None = None

    def start(self, session: Session, prompt: Prefill) -> None:
        """Route the prompt."""
        self.domain = self._router.route(prompt).domain
        record = self._bundle.domains[self.domain]
        self._fixed = FixedPlanner(record, self._latency, self._bundle.model.num_layers)

    def plan(self, context: int) -> Plan:
        """The best of that domain's frontier."""
        assert self._fixed is not None, "start() comes first"
        return self._fixed.plan(context)


class AutoPlanner(BasePlanner):
    """Speculates where that is predicted to be faster and turns out to be; decodes plainly otherwise.

    The nearest domain's frontier, or the mixture's for a prompt that is like no domain's. A domain's prediction is
    corrected by how validation compared with it when the bundle was made.
    """

    def __init__(self, bundle: Bundle, router: Router, latency: LatencyTable) -> None:
        self._bundle, self._router, self._latency = bundle, router, latency
        self._guard, self._current = Guard(), _Current()
        self._record: DomainRecord | None = None

    def start(self, session: Session, prompt: Prefill) -> None:
        """Route the prompt."""
        route = self._router.route(prompt)
        self.domain = route.domain if route.known else None
        self._record = self._bundle.domains[route.domain] if route.known else self._bundle.mixture

    def plan(self, context: int) -> Plan:
        """What is fastest at this context length, by prediction and by what the guard has measured."""
        if self._record is None:
            return Plan("plain: the prompt is like no domain of the bundle")
        option = self._current.at(context, self._record, self._latency, self._bundle.model.num_layers)
        if option is None:
            return Plan("plain: the domain has no masks")
        expected = option.speedup * _correction(self._record)
        if expected < MIN_GAIN:
            return Plan(f"plain: skipping is predicted to run at {expected:.2f}x")
        if self._guard.rest:
            return Plan("plain: speculation was measured to be slower, it is tried again later")
        return _speculate(option, expected)

    def observe(self, cycle: Cycle, states: list[Tensor] | None) -> None:
        """Let the guard judge the cycle."""
        plain = self._latency.step_seconds(cycle.context)
        verify = self._latency.step_seconds(cycle.context, cycle.drafted + 1)
        self._guard.observe(cycle, plain, verify)


def _correction(record: DomainRecord) -> float:
    """Measured ÷ predicted speed-up of the domain's choice, 1 when it was not validated."""
    if record.validation is None or record.choice is None or record.choice.predicted_speedup <= 0.0:
        return 1.0
    return record.validation.speedup / record.choice.predicted_speedup


def _speculate(option: Option, expected: float | None = None) -> Plan:
    speedup = option.speedup if expected is None else expected
    return Plan(
        f"draft {option.draft_length} with {option.entry.name}: {speedup:.2f}x predicted",
        option.entry.mask,
        option.draft_length,
        option.threshold,
        option.entry.name,
    )
