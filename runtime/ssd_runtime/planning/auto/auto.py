"""`auto`: whatever is expected to be fastest, cycle by cycle."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ssd_artifacts.domain_config import MIXTURE, ExitChoice
from ssd_profiles.latency import LatencyTable
from ssd_runtime.drafting.lookup import Lookup
from ssd_runtime.drafting.successors import Successors
from ssd_runtime.engine.session import Prefill, Session
from ssd_runtime.model.exit_heads import ExitHeads
from ssd_runtime.planning.auto.controller import Controller
from ssd_runtime.planning.auto.exit_drafts import ExitDrafts
from ssd_runtime.planning.auto.masked_drafts import MaskedDrafts
from ssd_runtime.planning.auto.offer import Source
from ssd_runtime.planning.auto.stream import Stream
from ssd_runtime.planning.papers.knn import Frontier
from ssd_runtime.planning.plan import BasePlanner, Cycle, Plan
from ssd_runtime.planning.routing import Router


def draft_sources(
    domain: str | None,
    frontiers: Mapping[str, Frontier],
    exits: Mapping[str, ExitChoice],
    heads: ExitHeads,
    latency: LatencyTable,
    stream: Stream,
    lookup: Lookup,
) -> tuple[list[Source], list[MaskedDrafts]]:
    """The model's ways to draft for a prompt of a domain, or the mixture's for one of none; alone and with others.

    With others there are the mixture's masks beside the domain's: prompts of any domain can draft with these together.
    """
    name = domain or MIXTURE
    masks = [
        MaskedDrafts(frontiers[each], latency, stream.masks[each], lookup)
        for each in dict.fromkeys((name, MIXTURE))
        if each in frontiers
    ]
    sources: list[Source] = [*masks[:1]] if name in frontiers else []
    if name in exits:
        sources.append(ExitDrafts(heads, exits[name], latency, stream.exits[name]))
    return sources, masks


class AutoPlanner(BasePlanner):
    """Guesses, the nearest domain's masks, its early exits, or a plain step (`Controller`).

    For a prompt that is like no domain's, the mixture's masks.
    """

    def __init__(
        self,
        frontiers: Mapping[str, Frontier],
        exits: Mapping[str, ExitChoice],
        heads: ExitHeads,
        router: Router | None,
        latency: LatencyTable,
        stream: Stream,
    ) -> None:
        self._frontiers, self._exits, self._heads = frontiers, exits, heads
        self._router, self._latency, self._stream = router, latency, stream
        self._controller: Controller | None = None
        self._session: Session | None = None
        self.successors: Successors | None = stream.lookup.successors

    def start(self, session: Session, prompt: Prefill) -> None:
        """Route the prompt."""
        self._session = session
        route = self._router.route(prompt) if self._router is not None else None
        self.domain = route.domain if route is not None and route.known else None
        lookup = Lookup(self._stream.lookup)
        lookup.open(session.ids)
        sources, common = draft_sources(
            self.domain, self._frontiers, self._exits, self._heads, self._latency, self._stream, lookup
        )
        self._controller = Controller(self._latency, self._stream, lookup, sources, common)

    def plan(self, context: int, pending: int) -> Plan:
        """The controller's choice."""
        assert self._controller is not None, "start() comes first"
        plan = self._controller.plan(context, pending, self._session.load if self._session is not None else None)
        # Reading the target's candidates is a part of planning's cost.
        self.successors = self._stream.lookup.successors if self._controller.planned else None
        return plan

    def observe(self, cycle: Cycle, states: list[Tensor] | None) -> None:
        """Let the controller learn from the cycle."""
        assert self._controller is not None, "start() comes first"
        self._controller.observe(cycle)

    def finish(self) -> None:
        """Let the controller hand its budget on."""
        if self._controller is not None:
            self._controller.finish()
