"""Drafts on light copies of the weights, as one of `auto`'s ways to draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from ssd_profiles.latency import LatencyTable
from ssd_profiles.mask import SubLayerPlan
from ssd_runtime.drafting.combined import DEEPEST, Extended
from ssd_runtime.drafting.lookup import Lookup
from ssd_runtime.drafting.masked import Masked
from ssd_runtime.planning.auto.draft_source import DraftProposal
from ssd_runtime.planning.auto.draft_stats import MIN_GAIN, DraftStats
from ssd_runtime.planning.auto.masked_drafts import UNSURE
from ssd_runtime.planning.by_context import ByContext
from ssd_runtime.planning.light import LIGHT
from ssd_runtime.planning.plan import Cycle, Plan

AGREEMENT = 0.95
"""Token agreement that is expected of 8 bits, and of 4 for weights on their grid, until this stream has its own."""
LONGEST = 12
"""Longest chain: the last token of a longer one is right too seldom."""


@dataclass(frozen=True, slots=True)
class _LightChain:
    """A draft length with its expected speed-up."""

    speedup: float
    length: int
    cost: float
    """Cost of a cycle, in plain steps; it does not depend on how many drafts are accepted."""


class LightDrafts:
    """Chains of the whole model on light weights, with guesses after them and second candidates beside them.

    A chain's length follows from the token agreement in this stream, since that is about the same at every place, and
    from the measured cost of a draft step.
    """

    def __init__(self, mask: SubLayerPlan, latency: LatencyTable, stats: DraftStats, lookup: Lookup) -> None:
        """`mask` skips nothing, and `latency` prices the light copies that it drafts on."""
        self.stats = stats
        self._lookup = lookup
        self._mask = mask
        self._step = ByContext(lambda context: latency.draft_cost(mask, context))
        """Cost of a draft step by the table, in plain steps."""

    def propose(self, context: int, costs: Sequence[float], most_cost: float) -> DraftProposal | None:
        """Propose the best length that the budget covers."""
        chains = self._chains(self._step.at(context) * self.stats.pace, costs)
        best = max(chain.speedup for chain in chains)
        if not self.stats.update_trust(best):
            return None
        covered = [chain for chain in chains if chain.cost <= most_cost and chain.speedup >= MIN_GAIN]
        if not covered:
            return DraftProposal(self, best)
        chain = max(covered, key=attrgetter("speedup"))
        return DraftProposal(source=self, best=best, plan=self._plan(chain, costs, most_cost), speedup=chain.speedup)

    def observe(self, cycle: Cycle, costs: Sequence[float], plain_seconds: float | None) -> float:
        """Update with the right tokens and the time of the draft steps; returns the cycle's cost in plain steps."""
        pace = self.stats.pace
        verification = costs[min(cycle.verified, len(costs)) - 1]
        steps = cycle.steps * self._step.at(cycle.context)
        if not cycle.is_cut:
            spent = cycle.draft_seconds / cycle.verify_seconds * verification if cycle.verify_seconds else steps * pace
            # Guesses after the chain are not the light model's.
            right = min(cycle.accepted, cycle.steps)
            tested = right + (right < cycle.steps)
            self.stats.update(right, tested * AGREEMENT, spent / steps)
        return verification + steps * pace

    @property
    def _agreement(self) -> float:
        """Expected token agreement in this stream."""
        return min(1.0, AGREEMENT * self.stats.factor)

    def _chains(self, step: float, costs: Sequence[float]) -> list[_LightChain]:
        """Every draft length, if a draft step costs `step`."""
        chains = list[_LightChain]()
        tokens = reached = 1.0
        for length in range(1, min(LONGEST, len(costs) - 1) + 1):
            reached *= self._agreement
            tokens += reached
            cost = length * step + costs[length]
            chains.append(_LightChain(tokens / cost, length, cost))
        return chains

    def _plan(self, chain: _LightChain, costs: Sequence[float], most_cost: float) -> Plan:
        """Plan the chain, with as many other rows as the rest of `most_cost` covers."""
        drafter = Extended(
            drafter=Masked(self._mask, branching=UNSURE),
            chain=chain.length,
            lookup=self._lookup,
            agreement=self._agreement,
            speedup=chain.speedup,
            row_costs=tuple(costs),
            most_cost=most_cost - chain.cost,
        )
        return Plan(
            reason=LIGHT,
            drafter=drafter,
            draft_length=chain.length + DEEPEST,
        )
