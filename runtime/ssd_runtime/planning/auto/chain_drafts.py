"""Chains on light copies of the weights or by the MTP layer, as two of `auto`'s ways to draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ssd_profiles.latency import LatencyTable
from ssd_profiles.mask import SubLayerPlan
from ssd_runtime.drafting.chain import Chain
from ssd_runtime.drafting.combined import DEEPEST
from ssd_runtime.drafting.lookup import Lookup
from ssd_runtime.drafting.masked import Masked
from ssd_runtime.drafting.mtp import MtpChain
from ssd_runtime.planning.auto.draft_source import UNSURE, DraftLength, DraftProposal, StepDrafts
from ssd_runtime.planning.auto.draft_stats import DraftStats
from ssd_runtime.planning.by_context import ByContext
from ssd_runtime.planning.light import LIGHT
from ssd_runtime.planning.mtp import MTP, mtp_cost
from ssd_runtime.planning.plan import Cycle, Plan

LIGHT_AGREEMENT = 0.95
"""Token agreement that is expected of 8 bits, and of 4 for weights on their grid, until this stream has its own."""
LIGHTER_AGREEMENT = 0.85
"""Token agreement that is expected of 4 bits beside 8. A model of 1.5B had 0.77 in writing, 0.90 in mixed prompts."""
LONGEST_LIGHT = 12
"""Longest chain: the last token of a longer one is right too seldom."""
MTP_AGREEMENT = 0.75
"""Token agreement that is expected of a chain by the MTP layer, whose first token is right more often than the next."""
LONGEST_MTP = 5


@dataclass(slots=True, eq=False)
class ChainDrafts(StepDrafts):
    """Chains of one kind of steps, with guesses after them and second candidates beside them.

    A chain's length follows from the token agreement in this stream, which is taken to be the same at every place, and
    from the measured cost of a draft step.
    """

    chain: Chain
    reason: str
    agreement: float
    """Token agreement that is expected until `stats` have this stream's."""
    longest: int
    step_cost: ByContext[float]
    """Cost of a step after so many tokens by the latency table, in plain steps."""

    @classmethod
    def light(
        cls, mask: SubLayerPlan, agreement: float, latency: LatencyTable, stats: DraftStats, lookup: Lookup
    ) -> ChainDrafts:
        """Drafts of the whole model on light copies; `mask` skips nothing, and `latency` prices it."""
        return cls(
            chain=Masked(mask, branching=UNSURE),
            reason=LIGHT,
            agreement=agreement,
            longest=LONGEST_LIGHT,
            step_cost=ByContext(lambda context: latency.draft_cost(mask, context)),
            stats=stats,
            lookup=lookup,
        )

    @classmethod
    def mtp(cls, latency: LatencyTable, stats: DraftStats, lookup: Lookup) -> ChainDrafts:
        """Drafts of a model's MTP layer."""
        return cls(
            chain=MtpChain(branching=UNSURE),
            reason=MTP,
            agreement=MTP_AGREEMENT,
            longest=LONGEST_MTP,
            step_cost=ByContext(lambda context: mtp_cost(latency, context)),
            stats=stats,
            lookup=lookup,
        )

    def propose(self, context: int, costs: Sequence[float], most_cost: float) -> DraftProposal | None:
        """Propose the best length that the budget covers."""
        step = self.step_cost.at(context) * self.stats.pace
        whole = (length * step + costs[length] for length in range(1, min(self.longest, len(costs) - 1) + 1))
        chains = self.chains(self.agreement, whole)
        return self.propose_best(chains, most_cost, lambda chain: self._plan(chain, costs, most_cost))

    def observe(self, cycle: Cycle, costs: Sequence[float], plain_seconds: float | None) -> float:
        """Update with the right tokens and the time of the draft steps; returns the cycle's cost in plain steps."""
        return self.charge(cycle, costs, cycle.steps * self.step_cost.at(cycle.context), self.agreement)

    def _plan(self, chain: DraftLength, costs: Sequence[float], most_cost: float) -> Plan:
        """Plan the chain, with as many other rows as the rest of `most_cost` covers."""
        drafter = self.extended(self.chain, chain, self.agreement, costs, most_cost)
        return Plan(self.reason, drafter, chain.length + DEEPEST)
