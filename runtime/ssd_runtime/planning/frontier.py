"""The masks of a bundle's domains, ready to choose from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean

from ssd_artifacts.domain_config import DomainConfig, LoadValidation
from ssd_profiles.latency import LatencyTable
from ssd_runtime.planning.by_context import ByContext
from ssd_runtime.planning.cost import CostModel, Entry, Option

REPLAN_GROWTH = 1.1
"""The context grows by this factor before masks are compared again."""


@dataclass(frozen=True, slots=True)
class Frontier:
    """A domain's masks, ready to choose from."""

    entries: tuple[Entry, ...]
    correction: float = 1.0
    """Predicted speed by validation's acceptance ÷ that by calibration's. A domain without a validation, such as the
    mixture, has the mean of the others."""
    under_load: tuple[LoadValidation, ...] = ()
    """Validations with several sequences at once, by ascending concurrency."""

    @classmethod
    def of_all(cls, domains: Mapping[str, DomainConfig], num_layers: int, latency: LatencyTable) -> dict[str, Frontier]:
        """The frontiers of a bundle's domains by name."""
        found = {name: _correction(domain, num_layers, latency) for name, domain in domains.items()}
        corrections = {name: correction for name, correction in found.items() if correction is not None}
        usual = fmean(corrections.values()) if corrections else 1.0
        return {
            name: cls(
                entries=tuple(Entry.of(each, num_layers, f"{name}[{i}]") for i, each in enumerate(domain.frontier)),
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


def _correction(domain: DomainConfig, num_layers: int, latency: LatencyTable) -> float | None:
    """Tokens/s by the acceptance in validation ÷ by the profile, at the domain's context; None if none drafted.

    Only acceptance is compared: it belongs to the model, while times of a validation belong to its machine and moment.
    """
    choice = domain.choice
    validation = domain.validation
    if validation is None or choice is None or not validation.mean_acceptance_length:  # of answers of one token
        return None
    costs = CostModel(latency)
    entry = domain.frontier[choice.entry]
    mask = entry.sub_layer_plan(num_layers)
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
