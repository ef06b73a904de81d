"""The best plan of each domain at each context, by the bundle's latency table and acceptance."""

from __future__ import annotations

from dataclasses import dataclass

from ssd_artifacts.domain_config import DomainConfig
from ssd_profiles.latency import LatencyTable
from ssd_runtime.planning.cost import CostModel, Entry, Option

CONTEXTS = (64, 256, 1024, 4096, 16384)


@dataclass(frozen=True, slots=True)
class Advice:
    """The best way to draft with a domain's masks at one context, by prediction."""

    context: int
    option: Option | None
    """None where the domain has no masks."""

    @property
    def text(self) -> str:
        """The plan with its speed-up, most drafts, the confidence at which they end, and the cost c of a draft step."""
        if self.option is None:
            return "plain: no masks"
        gain, cost = self.option.speedup, f"c {self.option.draft_cost:.2f}"
        if gain <= 1.0:
            return f"plain: {gain:.2f}x, {cost}"
        until = f" until {self.option.threshold:.2f}" if self.option.threshold > 0 else ""
        return f"{gain:.2f}x: {self.option.draft_length} drafts{until}, {cost}"


def advice(config: DomainConfig, latency: LatencyTable, num_layers: int) -> list[Advice]:
    """The best plan with the domain's masks at each context, by the latency table.

    `auto` begins with this, tries guesses besides, and corrects both by what it sees.
    """
    costs = CostModel(latency)
    entries = [Entry.of(entry, num_layers) for entry in config.frontier]
    longest = max(float(latency.contexts[-1]), CONTEXTS[0])
    contexts = [context for context in CONTEXTS if context <= longest] or [CONTEXTS[0]]
    return [Advice(context, costs.best_option(entries, context)) for context in contexts]
