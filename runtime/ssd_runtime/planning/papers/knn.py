"""Plans from a bundle's frontiers: those of a fixed domain (Self-SD), or of the nearest one (KNN-SSD)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean

from ssd_artifacts.domain_config import MIXTURE, DomainConfig, LoadValidation
from ssd_profiles.errors import UserError
from ssd_profiles.latency import LatencyTable
from ssd_runtime.engine.sequence.session import Prefill, Session
from ssd_runtime.planning.by_context import ByContext
from ssd_runtime.planning.cost import CostModel, Entry, Option
from ssd_runtime.planning.plan import PLAIN, BasePlanner, PlainPlanner, Plan, Planner
from ssd_runtime.planning.registry import FIXED
from ssd_runtime.planning.routing import Router
from ssd_runtime.planning.settings import NearestSettings
from ssd_runtime.planning.strategy import MakePlanner, StrategyInputs

REPLAN_GROWTH = 1.1
"""The context grows by this factor before masks are compared again."""


@dataclass(frozen=True, slots=True)
class Frontier:
    """A domain's masks, ready to choose from."""

    entries: tuple[Entry, ...]
    correction: float = 1.0
    """Speed by the acceptance in validation ÷ by that of calibration. A domain without a validation, such as the
    mixture, has the mean of the others."""
    under_load: tuple[LoadValidation, ...] = ()
    """Validations with several sequences at once, by ascending concurrency."""

    @classmethod
    def of_all(
        cls, domains: Mapping[str, DomainConfig], num_layers: int, latency: LatencyTable | None = None
    ) -> dict[str, Frontier]:
        """The frontiers of a bundle's domains by name; uncorrected without `latency`."""
        found = {name: _correction(domain, num_layers, latency) for name, domain in domains.items() if latency}
        corrections = {name: correction for name, correction in found.items() if correction is not None}
        usual = fmean(corrections.values()) if corrections else 1.0
        return {
            name: cls(
                entries=_entries(domain, num_layers),
                correction=corrections.get(name, usual),
                under_load=domain.validation.under_load if domain.validation is not None else (),
            )
            for name, domain in domains.items()
        }

    def pays_at(self, sequences: int) -> bool:
        """Whether masks may pay under a load of `sequences`, by the highest validated load that is no higher.

        Without such a validation the answer is yes: the predicted speed-up decides.
        """
        measured = [each.speedup for each in self.under_load if each.concurrency <= sequences]
        return not measured or measured[-1] >= 1.0

    def best(self, latency: LatencyTable) -> ByContext[Option | None]:
        """The entry, draft length and threshold with the most tokens/s, by context; None without entries."""
        costs = CostModel(latency)
        return ByContext(lambda context: costs.best_option(self.entries, context), REPLAN_GROWTH)


class FixedPlanner(BasePlanner):
    """Plans the entry of one domain's frontier with the most tokens/s at the current context length."""

    def __init__(self, frontier: Frontier, latency: LatencyTable, least_speedup: float = 0.0) -> None:
        self._best = frontier.best(latency)
        self._least_speedup = least_speedup

    def plan(self, context: int, pending: int) -> Plan:
        """Plan the frontier's best, or a plain step if that promises less than `least_speedup` or there is none."""
        option = self._best.at(context)
        return PLAIN if option is None or option.speedup < self._least_speedup else _speculate(option)


class NearestAnchorPlanner(BasePlanner):
    """Plans by the frontier of the nearest anchor's domain (KNN-SSD), or as `out_of_domain` says for other prompts."""

    def __init__(
        self,
        frontiers: Mapping[str, Frontier],
        router: Router,
        latency: LatencyTable,
        settings: NearestSettings,
        least_speedup: float = 0.0,
    ) -> None:
        """Masks that promise less than `least_speedup` are not used; the paper uses any."""
        self._frontiers = frontiers
        self._router = router
        self._latency = latency
        self._settings = settings
        self._least_speedup = least_speedup
        self._chosen: Planner = PlainPlanner()

    def start(self, session: Session, prompt: Prefill) -> None:
        """Route the prompt."""
        route = self._router.route(prompt)
        self.domain = route.domain
        if not route.known and self._settings.out_of_domain != "nearest":
            self.domain = MIXTURE if self._settings.out_of_domain == "mix" else None
        frontier = self._frontiers.get(self.domain or "")
        self._chosen = (
            PlainPlanner() if frontier is None else FixedPlanner(frontier, self._latency, self._least_speedup)
        )

    def plan(self, context: int, pending: int) -> Plan:
        """Plan the best of that domain's frontier."""
        return self._chosen.plan(context, pending)


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


def _entries(domain: DomainConfig, num_layers: int) -> tuple[Entry, ...]:
    return tuple(
        Entry(f"{domain.name}[{index}]", entry.skip_mask(num_layers), entry.profile())
        for index, entry in enumerate(domain.frontier)
    )


def _correction(domain: DomainConfig, num_layers: int, latency: LatencyTable) -> float | None:
    """Tokens/s by the acceptance in validation ÷ by the profile, at the domain's context; None without a validation.

    Only acceptance is compared: it belongs to the model, while times of a validation belong to its machine and moment.
    """
    choice = domain.choice
    validation = domain.validation
    if validation is None or choice is None:
        return None
    costs = CostModel(latency)
    entry = domain.frontier[choice.entry]
    mask = entry.skip_mask(num_layers)
    profile = entry.profile()
    row = profile.draft_lengths.index(choice.draft_length)
    column = profile.thresholds.index(choice.threshold)
    steps = float(profile.steps[row, column])
    accepted = validation.draft_acceptance_rate
    tokens = max(1.0, validation.mean_acceptance_length)
    drafted = (tokens - 1.0) / accepted if accepted else steps
    validated = costs.tokens_per_second(domain.context, tokens=tokens, steps=drafted, mask=mask)
    promised = float(profile.tokens[row, column])
    return validated / costs.tokens_per_second(domain.context, tokens=promised, steps=steps, mask=mask)


def _speculate(option: Option) -> Plan:
    return Plan.masked(
        reason=f"draft {option.draft_length} with {option.entry.name}: {option.speedup:.2f}x predicted",
        mask=option.entry.mask,
        draft_length=option.draft_length,
        threshold=option.threshold,
        entry=option.entry.name,
    )
