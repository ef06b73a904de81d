"""`auto` plans whatever has the highest expected tokens/s, cycle by cycle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from ssd_artifacts.domain_config import MIXTURE, ExitChoice
from ssd_profiles.latency import LatencyTable
from ssd_profiles.mask import SubLayerPlan
from ssd_runtime.drafting.lookup import Lookup
from ssd_runtime.model.exit_heads import ExitHeads
from ssd_runtime.model.head.output_head import OutputHead
from ssd_runtime.planning.auto.budget import Budget
from ssd_runtime.planning.auto.chain_drafts import LIGHT_AGREEMENT, LIGHTER_AGREEMENT, ChainDrafts
from ssd_runtime.planning.auto.controller import Controller
from ssd_runtime.planning.auto.draft_source import DraftSource
from ssd_runtime.planning.auto.exit_drafts import ExitDrafts
from ssd_runtime.planning.auto.head_drafts import HeadDrafts
from ssd_runtime.planning.auto.masked_drafts import MaskedDrafts
from ssd_runtime.planning.auto.stream import Stream
from ssd_runtime.planning.frontier import Frontier
from ssd_runtime.planning.plan import Cycle, Plan, Planner
from ssd_runtime.planning.routing import PromptRouter
from ssd_runtime.planning.strategy import MakePlanner, StrategyInputs
from ssd_runtime.sequence.prefill import Prefill
from ssd_runtime.sequence.session import Session


@dataclass(eq=False)
class AutoPlanner(Planner):
    """Plans guesses, the nearest domain's masks or early exits, or other drafts by the model, or a plain step.

    `Controller` chooses among them. A prompt out of every domain has the mixture's masks.
    """

    frontiers: Mapping[str, Frontier]
    exits: Mapping[str, ExitChoice]
    heads: ExitHeads
    router: PromptRouter | None
    latency: LatencyTable
    stream: Stream
    light: Sequence[SubLayerPlan] = ()
    head: OutputHead | None = None
    """The model's head, if drafts may score a part of its vocabulary."""
    mtp: bool = False
    _controller: Controller | None = None
    _session: Session | None = None

    def __post_init__(self) -> None:
        self.successors = self.stream.lookup.successors

    @property
    def budget(self) -> Budget | None:
        """The request's loss budget; None before its prompt has been run."""
        return self._controller.budget if self._controller is not None else None

    @property
    def plain_seconds(self) -> float | None:
        """Recent seconds of a plain step of a lone request; None before the first verification."""
        if self._controller is None or self._session is None:
            return None
        return self._controller.plain_seconds(self._session.committed)

    def start(self, session: Session, prompt: Prefill) -> None:
        """Route the prompt and make its controller."""
        self._session = session
        route = self.router.route(prompt) if self.router is not None else None
        self.domain = route.domain if route is not None and route.known else None
        lookup = Lookup(self.stream.lookup)
        lookup.start(session.ids, session.matcher)
        sources, common = self.draft_sources(self.domain, lookup)
        self._controller = Controller(self.latency, self.stream, lookup, sources=sources, common=common)

    def draft_sources(self, domain: str | None, lookup: Lookup) -> tuple[list[DraftSource], list[MaskedDrafts]]:
        """The model's ways to draft for a prompt of `domain`, or for one out of every domain (None).

        Returns the sources for a request that is alone, and the masks for requests that share their steps. The latter
        have the mixture's masks as well as the domain's, since prompts of any domain can draft with these together.
        """
        name = domain or MIXTURE
        latency, stream = self.latency, self.stream
        masks = [
            MaskedDrafts(frontier=self.frontiers[each], latency=latency, stats=stream.masks[each], lookup=lookup)
            for each in dict.fromkeys((name, MIXTURE))
            if each in self.frontiers
        ]
        sources: list[DraftSource] = [*masks[:1]] if name in self.frontiers else []
        if name in self.exits:
            choice = self.exits[name]
            sources.append(ExitDrafts(heads=self.heads, choice=choice, latency=latency, stats=stream.exits[name]))
        for place, mask in enumerate(self.light):
            stats, agreement = stream.light[mask], LIGHTER_AGREEMENT if place else LIGHT_AGREEMENT
            drafts = ChainDrafts.light(mask=mask, agreement=agreement, latency=latency, stats=stats, lookup=lookup)
            sources.append(drafts)
        if self.head is not None:
            sources.append(HeadDrafts.of(self.head, self.heads, latency, stream.head, lookup))
        if self.mtp:
            sources.append(ChainDrafts.mtp(latency=latency, stats=stream.mtp, lookup=lookup))
        return sources, masks

    def plan(self, context: int) -> Plan:
        """Plan the controller's choice."""
        assert self._controller is not None, "start() comes first"
        assert self._session is not None, "start() comes first"
        plan = self._controller.plan(context, self._session.pending, self._session.load)
        # Updating the table is a part of planning's cost, so it is omitted in cycles that are not planned.
        self.successors = self.stream.lookup.successors if self._controller.planned else None
        return plan

    def observe(self, cycle: Cycle, states: list[Tensor] | None) -> None:
        """Update the controller with the cycle."""
        assert self._controller is not None, "start() comes first"
        self._controller.observe(cycle)

    def finish(self) -> None:
        """Let the controller give its budget back."""
        if self._controller is not None:
            self._controller.finish()


def make_auto(inputs: StrategyInputs) -> MakePlanner:
    """Return a maker of `auto` planners, which share the stream's statistics and budgets."""
    latency = inputs.measured_latency
    domains, exits = ({}, {}) if inputs.guesses_alone else (inputs.domains, inputs.exit_choices)
    return partial(
        AutoPlanner,
        frontiers=Frontier.of_all(domains, inputs.num_layers, latency),
        exits=exits,
        heads=inputs.make_exit_heads(),
        router=inputs.make_router(),
        latency=latency,
        stream=Stream(inputs.make_lookup_stats()),
        light=inputs.light,
        head=inputs.decoder.head if inputs.settings.head and not inputs.guesses_alone else None,
        mtp=inputs.decoder.mtp is not None and not inputs.guesses_alone and bool(inputs.settings.mtp),
    )
