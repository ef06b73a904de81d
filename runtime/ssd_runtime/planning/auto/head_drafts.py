"""Plain steps that score a part of the vocabulary each, and all of it together, as one of `auto`'s ways to draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ssd_profiles.latency import LatencyTable
from ssd_runtime.drafting.early_exit import EarlyExit
from ssd_runtime.drafting.lookup import Lookup
from ssd_runtime.model.exit_heads import ExitHeads
from ssd_runtime.model.head.output_head import OutputHead
from ssd_runtime.planning.auto.controller import MIN_ADVANTAGE
from ssd_runtime.planning.auto.draft_source import DraftLength, DraftProposal, StepDrafts
from ssd_runtime.planning.auto.draft_stats import DraftStats
from ssd_runtime.planning.by_context import ByContext
from ssd_runtime.planning.lookup import best_guess
from ssd_runtime.planning.plan import Cycle, Plan
from ssd_runtime.planning.settings import MOST_GUESSES

AGREEMENT = 0.98
"""Token agreement that is expected until this stream has its own; it is the share of tokens that drafts score."""
LEAST_REST = 0.01
"""Least share of a step beside its head: a crafted table may have none."""
LONGEST = 8
"""Longest chain: with it the whole head's share of a cycle is small already."""


@dataclass(frozen=True, slots=True)
class _Costs:
    """Costs at one context, in plain steps."""

    step: float
    """A plain step whose head scores a part of the vocabulary."""
    last: float
    """A plain step without its head, which the last token takes."""
    heads: tuple[float, ...]
    """The whole head of 1, 2, … rows."""

    @classmethod
    def of(cls, latency: LatencyTable, context: float) -> _Costs:
        plain = latency.step_seconds(context)
        heads = tuple(latency.head_seconds(rows) / plain for rows in range(1, LONGEST + 2))
        last = max(1.0 - heads[0], LEAST_REST)
        return cls(last + latency.draft_head_seconds(1) / plain, last, heads)

    def drafting(self, tokens: int) -> float:
        """The cost of the states of the pending token and of `tokens` drafts after it."""
        return tokens * self.step + self.last


@dataclass(slots=True, eq=False)
class HeadDrafts(StepDrafts):
    """Chains of the whole model, whose states are plain decoding's, so that the whole head alone verifies them.

    It is read once for all tokens of a chain, not once per token. Steps differ from plain ones in nothing else, so a
    draft is wrong only where the model's choice is none of the tokens that are scored.
    """

    head: OutputHead
    drafter: EarlyExit
    costs: ByContext[_Costs]

    @classmethod
    def of(
        cls, head: OutputHead, heads: ExitHeads, latency: LatencyTable, stats: DraftStats, lookup: Lookup
    ) -> HeadDrafts:
        """Drafts that exit after the last layer."""
        return cls(
            stats=stats,
            lookup=lookup,
            head=head,
            drafter=EarlyExit(heads, (len(latency.layer_kinds),), threshold=0.0),
            costs=ByContext(lambda context: _Costs.of(latency, context)),
        )

    def propose(self, context: int, costs: Sequence[float], most_cost: float) -> DraftProposal | None:
        """Propose the best length that the budget covers, while drafts score a part of the vocabulary."""
        if not self.head.scores_partly:
            return None
        own = self.costs.at(context)
        whole = (own.drafting(n) * self.stats.pace + own.heads[n] for n in range(1, LONGEST + 1))

        def plan(chain: DraftLength) -> Plan:
            def goes_on(tokens: Sequence[int]) -> bool:
                """Whether guesses after these tokens would not be verified in place of such a chain."""
                guess = best_guess(self.lookup, costs, MOST_GUESSES, most_cost, tokens)
                return not guess.tree or chain.speedup >= MIN_ADVANTAGE * guess.speedup

            return Plan("frequent tokens", replace(self.drafter, goes_on=goes_on), chain.length)

        return self.propose_best(self.chains(AGREEMENT, whole), most_cost, plan)

    def observe(self, cycle: Cycle, costs: Sequence[float], plain_seconds: float | None) -> float:
        """Update with the right tokens and the time of the steps; returns the cycle's cost in plain steps."""
        own = self.costs.at(cycle.context)
        return self.charge(cycle, own.heads, own.drafting(cycle.steps), AGREEMENT)
