"""Chains on light copies of the weights or by the MTP layer, as two of `auto`'s ways to draft."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ssd_profiles.latency import LatencyTable
from ssd_profiles.mask import SubLayerPlan
from ssd_runtime.drafting.chain import Chain
from ssd_runtime.drafting.combined import DEEPEST, Extended
from ssd_runtime.drafting.lookup import Lookup
from ssd_runtime.drafting.masked import Masked
from ssd_runtime.drafting.mtp import MtpChain
from ssd_runtime.planning.auto.draft_source import DraftLength, DraftProposal, best_covered
from ssd_runtime.planning.auto.draft_stats import DraftStats
from ssd_runtime.planning.auto.masked_drafts import UNSURE
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


class ChainDrafts:
    """Chains of one kind of steps, with guesses after them and second candidates beside them.

    A chain's length follows from the token agreement in this stream, which is taken to be the same at every place, and
    from the measured cost of a draft step.
    """

    def __init__(
        self,
        chain: Chain,
        reason: str,
        agreement: float,
        longest: int,
        step_cost: Callable[[int], float],
        stats: DraftStats,
        lookup: Lookup,
    ) -> None:
        """Draft at most `longest` tokens by `chain`; `agreement` is expected until `stats` have this stream's.

        `step_cost` is the cost of a step after so many tokens by the latency table, in plain steps.
        """
        self.stats = stats
        self._chain = chain
        self._reason = reason
        self._prior = agreement
        self._longest = longest
        self._lookup = lookup
        self._step = ByContext(step_cost)

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
            step_cost=lambda context: latency.draft_cost(mask, context),
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
            step_cost=lambda context: mtp_cost(latency, context),
            stats=stats,
            lookup=lookup,
        )

    def propose(self, context: int, costs: Sequence[float], most_cost: float) -> DraftProposal | None:
        """Propose the best length that the budget covers."""
        chains = self._chains(self._step.at(context) * self.stats.pace, costs)
        best = max(chain.speedup for chain in chains)
        if not self.stats.update_trust(best):
            return None
        chain = best_covered(chains, most_cost)
        if chain is None:
            return DraftProposal(self, best)
        return DraftProposal(source=self, best=best, plan=self._plan(chain, costs, most_cost), speedup=chain.speedup)

    def observe(self, cycle: Cycle, costs: Sequence[float], plain_seconds: float | None) -> float:
        """Update with the right tokens and the time of the draft steps; returns the cycle's cost in plain steps."""
        pace = self.stats.pace
        verification = costs[min(cycle.verified, len(costs)) - 1]
        steps = cycle.steps * self._step.at(cycle.context)
        if not cycle.is_cut:
            spent = cycle.draft_seconds / cycle.verify_seconds * verification if cycle.verify_seconds else steps * pace
            # Guesses after the chain are not the steps'.
            right = min(cycle.accepted, cycle.steps)
            tested = right + (right < cycle.steps)
            self.stats.update(right, tested * self._prior, spent / steps)
        return verification + steps * pace

    @property
    def _agreement(self) -> float:
        """Expected token agreement in this stream."""
        return min(1.0, self._prior * self.stats.factor)

    def _chains(self, step: float, costs: Sequence[float]) -> list[DraftLength]:
        """Every draft length, if a draft step costs `step`."""
        chains = list[DraftLength]()
        tokens = reached = 1.0
        for length in range(1, min(self._longest, len(costs) - 1) + 1):
            reached *= self._agreement
            tokens += reached
            cost = length * step + costs[length]
            chains.append(DraftLength(tokens / cost, length, cost))
        return chains

    def _plan(self, chain: DraftLength, costs: Sequence[float], most_cost: float) -> Plan:
        """Plan the chain, with as many other rows as the rest of `most_cost` covers."""
        drafter = Extended(
            drafter=self._chain,
            chain=chain.length,
            lookup=self._lookup,
            agreement=self._agreement,
            speedup=chain.speedup,
            row_costs=tuple(costs),
            most_cost=most_cost - chain.cost,
        )
        return Plan(
            reason=self._reason,
            drafter=drafter,
            draft_length=chain.length + DEEPEST,
        )
