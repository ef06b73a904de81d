"""The interface between the controller and the ways to draft by steps of the model, and the base of chains."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Protocol

from ssd_runtime.drafting.chain import Branching
from ssd_runtime.drafting.combined import Extended
from ssd_runtime.drafting.lookup import Lookup
from ssd_runtime.drafting.tree import Drafter
from ssd_runtime.planning.auto.draft_stats import MIN_GAIN, OUTLIER, DraftStats
from ssd_runtime.planning.plan import Cycle, Plan

UNSURE: Branching = ((0.5, 2),)
"""A second candidate may be verified beside a token whose probability is at most this."""


@dataclass(frozen=True, slots=True)
class DraftProposal:
    """Drafts that the model could make in the next cycle."""

    source: DraftSource
    best: float
    """Expected speed-up against plain decoding at the best length, whether the budget covers that or not."""
    plan: Plan | None = None
    """The best plan that the budget covers; None if it covers none that gains."""
    speedup: float = 0.0
    """Expected speed-up of the plan."""


@dataclass(frozen=True, slots=True)
class DraftLength:
    """A length of chains with its expected speed-up."""

    speedup: float
    length: int
    cost: float
    """Cost of a cycle whose drafts are all rejected, in plain steps."""


class DraftSource(Protocol):
    """A way to draft by steps of the model, for one request."""

    stats: DraftStats
    """Statistics of these drafts in this stream."""

    def propose(self, context: int, costs: Sequence[float], most_cost: float) -> DraftProposal | None:
        """Propose the best draft after `context` committed tokens; None if no length is expected to gain.

        costs[n] is the cost of verifying n drafts and `most_cost` the largest cost of the cycle, both in plain steps.
        """
        ...

    def observe(self, cycle: Cycle, costs: Sequence[float], plain_seconds: float | None) -> float:
        """Update with the cycle of the latest proposal; returns the cycle's cost in plain steps.

        `costs` are those of `propose`. `plain_seconds` are the current seconds of a plain step at the cycle's context,
        or None if unknown.
        """
        ...


@dataclass(slots=True, eq=False)
class StepDrafts(DraftSource):
    """Chains of draft steps, extended by guesses."""

    stats: DraftStats
    lookup: Lookup

    def chains(self, agreement: float, costs: Iterable[float]) -> list[DraftLength]:
        """Chains of 1, 2, … drafts whose cycles have these `costs`, if each token has the corrected `agreement`."""
        found = list[DraftLength]()
        tokens = reached = 1.0
        agreement = min(1.0, agreement * self.stats.factor)
        for length, cost in enumerate(costs, start=1):
            reached *= agreement
            tokens += reached
            found.append(DraftLength(tokens / cost, length, cost))
        return found

    def propose_best(
        self, chains: Sequence[DraftLength], most_cost: float, plan: Callable[[DraftLength], Plan]
    ) -> DraftProposal | None:
        """Propose the best chain that gains and costs at most `most_cost`; None if no chain is worth its risk."""
        if not chains:
            return None  # a table of one number of rows prices no verification of drafts
        best = max(chain.speedup for chain in chains)
        if not self.stats.update_trust(best):
            return None
        covered = [each for each in chains if each.cost <= most_cost and each.speedup >= MIN_GAIN]
        chain = max(covered, key=attrgetter("speedup"), default=None)
        if chain is None:
            return DraftProposal(self, best)
        return DraftProposal(source=self, best=best, plan=plan(chain), speedup=chain.speedup)

    def extended(
        self, drafter: Drafter, chain: DraftLength, agreement: float, costs: Sequence[float], most_cost: float
    ) -> Extended:
        """The chain, with as many other rows as the rest of `most_cost` covers."""
        return Extended(
            drafter=drafter,
            chain=chain.length,
            lookup=self.lookup,
            agreement=min(1.0, agreement * self.stats.factor),
            speedup=chain.speedup,
            row_costs=tuple(costs),
            most_cost=most_cost - chain.cost,
        )

    def charge(self, cycle: Cycle, costs: Sequence[float], steps: float, agreement: float, timed: bool = True) -> float:
        """Update with a cycle's right tokens and the time of its draft steps; returns the cycle's cost in plain steps.

        `steps` is the draft steps' cost by the latency table, in plain steps, and `agreement` the expected token
        agreement. Only the time of steps that were `timed` for this sequence alone, with no other step between them,
        changes the pace.
        """
        verification = costs[min(cycle.verified, len(costs)) - 1]
        expected = spent = steps * self.stats.pace
        if timed and cycle.verify_seconds and not cycle.held:
            # A stall of the system is not the drafts' doing, and would forbid them for thousands of tokens.
            spent = min(cycle.draft_seconds / cycle.verify_seconds * verification, OUTLIER * expected)
        if not cycle.is_cut:
            # Guesses after the chain are not the steps'.
            right = min(cycle.accepted, cycle.steps)
            tested = right + (right < cycle.steps)
            self.stats.update(right, tested * agreement, spent / steps)
        # Steps that take longer than others have are a loss.
        return verification + max(expected, spent)
