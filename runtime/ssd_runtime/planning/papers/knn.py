"""Plans from a bundle's frontiers: those of a fixed domain (Self-SD), or of the nearest one (KNN-SSD)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ssd_artifacts.domain_config import MIXTURE
from ssd_profiles.errors import UserError
from ssd_profiles.latency import LatencyTable
from ssd_runtime.planning.cost import Option
from ssd_runtime.planning.frontier import Frontier
from ssd_runtime.planning.plan import PLAIN, PlainPlanner, Plan, Planner
from ssd_runtime.planning.registry import FIXED
from ssd_runtime.planning.routing import PromptRouter
from ssd_runtime.planning.settings import NearestSettings
from ssd_runtime.planning.strategy import MakePlanner, StrategyInputs
from ssd_runtime.sequence.prefill import Prefill
from ssd_runtime.sequence.session import Session


class FixedPlanner(Planner):
    """Plans the entry of one domain's frontier with the most tokens/s at the current context length."""

    def __init__(self, frontier: Frontier, latency: LatencyTable, least_speedup: float = 0.0) -> None:
        self._best = frontier.best(latency)
        self._least_speedup = least_speedup

    def plan(self, context: int) -> Plan:
        """Plan the frontier's best, or a plain step if that promises less than `least_speedup` or there is none."""
        option = self._best.at(context)
        return PLAIN if option is None or option.speedup < self._least_speedup else _speculate(option)


@dataclass(eq=False)
class NearestAnchorPlanner(Planner):
    """Plans by the frontier of the nearest anchor's domain (KNN-SSD), or as `out_of_domain` says for other prompts."""

    frontiers: Mapping[str, Frontier]
    router: PromptRouter
    latency: LatencyTable
    settings: NearestSettings
    least_speedup: float = 0.0
    """Masks that promise less are not used; the paper uses any."""
    _chosen: Planner = field(default_factory=PlainPlanner)

    def start(self, session: Session, prompt: Prefill) -> None:
        """Route the prompt."""
        route = self.router.route(prompt)
        self.domain = route.domain
        if not route.known and self.settings.out_of_domain != "nearest":
            self.domain = MIXTURE if self.settings.out_of_domain == "mix" else None
        frontier = self.frontiers.get(self.domain or "")
        self._chosen = PlainPlanner() if frontier is None else FixedPlanner(frontier, self.latency, self.least_speedup)

    def plan(self, context: int) -> Plan:
        """Plan the best of that domain's frontier."""
        return self._chosen.plan(context)


def make_fixed(inputs: StrategyInputs) -> MakePlanner:
    """Return a maker of planners of the domain after `fixed:`. Raises UserError if the bundle has no such domain."""
    latency = inputs.measured_latency
    frontiers = Frontier.of_all(inputs.domains, inputs.num_layers, latency)
    chosen = frontiers.get(inputs.name.removeprefix(FIXED))
    if chosen is None:
        raise UserError(f"--strategy {inputs.name}: the bundle has no such domain; it has {', '.join(frontiers)}")
    return lambda: FixedPlanner(chosen, latency)


def make_knn(inputs: StrategyInputs) -> MakePlanner:
    """Return a maker of KNN-SSD planners. Raises UserError if the settings ask for a mixture that is not there."""
    latency = inputs.measured_latency
    router = inputs.make_router()
    assert router is not None, "check_strategy() comes first"
    frontiers = Frontier.of_all(inputs.domains, inputs.num_layers, latency)
    if inputs.settings.out_of_domain == "mix" and MIXTURE not in frontiers:
        raise UserError("--set out_of_domain=mix: the bundle has no mixture; compile two domains or more together")
    return lambda: NearestAnchorPlanner(
        frontiers=frontiers,
        router=router,
        latency=latency,
        settings=inputs.settings,
    )


def _speculate(option: Option) -> Plan:
    return Plan.masked(
        reason=f"draft {option.draft_length} with {option.entry.name}: {option.speedup:.2f}x predicted",
        mask=option.entry.mask,
        draft_length=option.draft_length,
        threshold=option.threshold,
        entry=option.entry.name,
    )
