"""Planning from a bundle's frontiers: a fixed domain (Self-SD), or the nearest one (KNN-SSD)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean

from ssd_artifacts.domain_config import MIXTURE, DomainConfig, LoadValidation
from ssd_profiles.latency import LatencyTable
from ssd_runtime.engine.session import Prefill, Session
from ssd_runtime.planning.by_context import ByContext
from ssd_runtime.planning.cost import CostModel, Entry, Option
from ssd_runtime.planning.plan import PLAIN, BasePlanner, PlainPlanner, Plan, Planner
from ssd_runtime.planning.routing import Router
from ssd_runtime.planning.settings import NearestSettings

REPLAN_GROWTH = 1.1
"""The context grows by this factor before masks are compared again."""


@dataclass(frozen=True, slots=True)
class Frontier:
    """A domain's masks, ready to choose from."""

    entries: tuple[Entry, ...]
    correction: float = 1.0
    """Speed by what was accepted in validation ÷ by what calibration had promised; where nobody validated, as with
    the mixture, the mean of the others'."""
    under_load: tuple[LoadValidation, ...] = ()
    """What validation measured with several sequences at once, by ascending concurrency."""

    @classmethod
    def of_all(
        cls, records: Mapping[str, DomainConfig], num_layers: int, latency: LatencyTable | None = None
    ) -> dict[str, Frontier]:
        """The frontiers of a bundle's domains; corrected where there are latencies to correct with."""
        found = {name: _correction(record, num_layers, latency) for name, record in records.items() if latency}
        corrections = {name: correction for name, correction in found.items() if correction is not None}
        usual = fmean(corrections.values()) if corrections else 1.0
        return {
            name: cls(
                _entries(record, num_layers),
                corrections.get(name, usual),
                record.validation.under_load if record.validation is not None else (),
            )
            for name, record in records.items()
        }

    def pays_at(self, sequences: int) -> bool:
        """Whether masks may pay where so many sequences decode, by the nearest load at or below that was validated.

        With one sequence, and where nothing was validated, they may: their promises decide.
        """
        measured = [each.speedup for each in self.under_load if each.concurrency <= sequences]
        return not measured or measured[-1] >= 1.0

    def best(self, latency: LatencyTable) -> ByContext[Option | None]:
        """The entry, draft length and threshold of most tokens a second; None without entries."""
        costs = CostModel(latency)
        return ByContext(lambda context: costs.best_option(self.entries, context), REPLAN_GROWTH)


class FixedPlanner(BasePlanner):
    """One domain's frontier for every prompt; the best of it by tokens a second at the current context length."""

    def __init__(self, frontier: Frontier, latency: LatencyTable, least_speedup: float = 0.0) -> None:
        self._best, self._least_speedup = frontier.best(latency), least_speedup

    def plan(self, context: int, pending: int) -> Plan:
        """The frontier's best, or a plain step where it promises too little or the frontier is empty."""
        option = self._best.at(context)
        return PLAIN if option is None or option.speedup < self._least_speedup else _speculate(option)


class NearestAnchorPlanner(BasePlanner):
    """KNN-SSD: the frontier of the domain with the nearest anchor, or `out_of_domain` for a prompt like none."""

    def __init__(
        self,
        frontiers: Mapping[str, Frontier],
        router: Router,
        latency: LatencyTable,
        settings: NearestSettings,
        least_speedup: float = 0.0,
    ) -> None:
        """Masks that promise less than `least_speedup` are not drafted with; the paper takes any."""
        self._frontiers, self._router, self._latency, self._settings = frontiers, router, latency, settings
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
        """The best of that domain's frontier."""
        return self._chosen.plan(context, pending)


def _entries(record: DomainConfig, num_layers: int) -> tuple[Entry, ...]:
    return tuple(
        Entry(f"{record.name}[{index}]", entry.skip_mask(num_layers), entry.profile())
        for index, entry in enumerate(record.frontier)
    )


def _correction(record: DomainConfig, num_layers: int, latency: LatencyTable) -> float | None:
    """Tokens a second by what was accepted ÷ by what was promised, at the record's context; None if nobody validated.

    By acceptance alone: that is the model's, while times of validation are another machine's, and of one moment.
    """
    choice, validation = record.choice, record.validation
    if validation is None or choice is None:
        return None
    entry, costs = record.frontier[choice.entry], CostModel(latency)
    mask, profile = entry.skip_mask(num_layers), entry.profile()
    row, column = profile.draft_lengths.index(choice.draft_length), profile.thresholds.index(choice.threshold)
    promised, steps = float(profile.tokens[row, column]), float(profile.steps[row, column])
    tokens, accepted = max(1.0, validation.mean_acceptance_length), validation.draft_acceptance_rate
    drafted = (tokens - 1.0) / accepted if accepted else steps
    found = costs.tokens_per_second(record.context, tokens, drafted, mask)
    return found / costs.tokens_per_second(record.context, promised, steps, mask)


def _speculate(option: Option) -> Plan:
    return Plan.masked(
        f"draft {option.draft_length} with {option.entry.name}: {option.speedup:.2f}x predicted",
        option.entry.mask,
        option.draft_length,
        option.threshold,
        option.entry.name,
    )
