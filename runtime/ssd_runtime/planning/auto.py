"""`auto`: whatever is expected to be fastest, cycle by cycle."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ssd_artifacts.domain_record import MIXTURE
from ssd_profiles.latency import LatencyTable
from ssd_runtime.planning.controller import NO_MASKS, Controller, Stream
from ssd_runtime.planning.frontier import Frontier
from ssd_runtime.planning.plan import BasePlanner, Cycle, Plan
from ssd_runtime.routing import Router
from ssd_runtime.session import Prefill, Session


class AutoPlanner(BasePlanner):
    """Guesses, the nearest domain's masks, or a plain step (`Controller`).

    For a prompt that is like no domain's, the mixture's masks.
    """

    def __init__(
        self, frontiers: Mapping[str, Frontier], router: Router | None, latency: LatencyTable, stream: Stream
    ) -> None:
        self._frontiers, self._router, self._latency, self._stream = frontiers, router, latency, stream
        self._controller: Controller | None = None
        self.followers = stream.lookup.followers

    def start(self, session: Session, prompt: Prefill) -> None:
        """Route the prompt."""
        route = self._router.route(prompt) if self._router is not None else None
        self.domain = route.domain if route is not None and route.known else None
        name = self.domain or MIXTURE
        frontier = self._frontiers.get(name, NO_MASKS)
        self._controller = Controller(self._latency, self._stream, session.ids, name, frontier)

    def plan(self, context: int, pending: int) -> Plan:
        """The controller's choice."""
        assert self._controller is not None, "start() comes first"
        return self._controller.plan(context, pending)

    def observe(self, cycle: Cycle, states: list[Tensor] | None) -> None:
        """Let the controller learn from the cycle."""
        assert self._controller is not None, "start() comes first"
        self._controller.observe(cycle)
