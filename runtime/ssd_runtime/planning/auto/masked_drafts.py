"""Masked drafts as one of `auto`'s ways to draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ssd_profiles.latency import LatencyTable
from ssd_profiles.mask import SubLayerPlan
from ssd_runtime.drafting.combined import DEEPEST
from ssd_runtime.drafting.lookup import Lookup
from ssd_runtime.drafting.masked import Masked
from ssd_runtime.planning.auto.draft_source import UNSURE, DraftLength, DraftProposal, StepDrafts
from ssd_runtime.planning.auto.draft_stats import DraftStats
from ssd_runtime.planning.auto.shared_step import ChainYield, Share
from ssd_runtime.planning.cost import Option
from ssd_runtime.planning.frontier import Frontier
from ssd_runtime.planning.plan import Cycle, Plan


@dataclass(frozen=True, slots=True)
class _LengthStats:
    """Statistics of a draft length, by the mask's acceptance profile at its confidence threshold."""

    length: int
    steps: float
    """Draft steps per cycle."""
    gain: float
    """Tokens per cycle beyond those of the next shorter length, or beyond one."""
    depth: float
    """Average number of drafted tokens that must be right for one token of the gain."""


class MaskedDrafts(StepDrafts):
    """The best mask of a domain's frontier, with guesses after the masked chain and second candidates beside it.

    The statistics are of right tokens ÷ those that the mask's token agreement predicts. The expectation for whole
    drafts follows from them: drafts get shorter on hard text and longer on easy text.
    """

    def __init__(self, frontier: Frontier, latency: LatencyTable, stats: DraftStats, lookup: Lookup) -> None:
        super().__init__(stats, lookup)
        self._frontier = frontier
        self._best = frontier.best(latency)
        self._option: Option | None = None
        self._length_stats: list[_LengthStats] = []
        """Statistics of the option's draft lengths, ascending."""
        self._share: Share | None = None
        """The latest proposal's part in a shared step; None if it was made for a sequence that is alone."""

    def propose(self, context: int, costs: Sequence[float], most_cost: float) -> DraftProposal | None:
        """Propose the mask that is best by latency, at the best length that the budget covers."""
        self._share = None
        option = self._update_option(context)
        if option is None:
            return None
        chains = self._chains(option, costs, option.draft_cost * self.stats.pace)
        return self.propose_best(chains, most_cost, lambda chain: self._plan(option, chain, costs, most_cost))

    def yields(self, context: int, sequences: int) -> tuple[SubLayerPlan, tuple[ChainYield, ...]] | None:
        """The mask that is best by latency, with the yields of its chains in a step that `sequences` sequences share.

        None if the domain has no masks, or if validation measured that they do not pay under this load.
        """
        option = self._update_option(context) if self._frontier.pays_at(sequences) else None
        if option is None:
            return None
        correction = self._frontier.correction
        corrected = [ChainYield(each.length, each.steps, each.tokens * correction) for each in self._yields(option)]
        return option.entry.mask, tuple(corrected)

    def take_part(self, share: Share, costs: Sequence[float], most_cost: float) -> DraftProposal | None:
        """Propose a part in a shared step; None if that has another mask, or if the budget does not cover it."""
        option = self._option
        if option is None or option.entry.mask != share.mask:
            return None
        chains = self._chains(option, costs, share.step_cost * self.stats.pace)
        chain = next((each for each in chains if each.length == share.length), None)
        if chain is None or chain.cost > most_cost:
            return None
        self._share = share
        plan = self._plan(option=option, chain=chain, costs=costs, most_cost=most_cost)
        return DraftProposal(source=self, best=chain.speedup, plan=plan, speedup=chain.speedup)

    def observe(self, cycle: Cycle, costs: Sequence[float], plain_seconds: float | None) -> float:
        """Update with the right tokens and the time of the draft steps; returns the cycle's cost in plain steps.

        The time of a shared step belongs to several sequences. So all planned steps are charged there, and the pace
        does not change.
        """
        option = self._option
        share = self._share
        assert option is not None, "there was a proposal"
        steps = cycle.steps * option.draft_cost if share is None else share.length * share.step_cost
        return self.charge(cycle, costs, steps, option.entry.profile.token_agreement, timed=share is None)

    def _update_option(self, context: int) -> Option | None:
        """Update the option to the frontier's best at this context, with the statistics of its lengths; returns it."""
        option = self._best.at(context)
        if option is not None and option is not self._option:
            self._option = option
            self._length_stats = _length_stats(option)
        return option

    def _yields(self, option: Option) -> list[ChainYield]:
        """Expected yield of every draft length in this stream."""
        tokens = 1.0
        yields = list[ChainYield]()
        # The corrected token agreement must not exceed 1.
        likelier = min(self.stats.factor, 1.0 / max(option.entry.profile.token_agreement, 0.5))
        for each in self._length_stats:
            tokens = min(tokens + each.gain * likelier**each.depth, each.steps + 1.0)
            yields.append(ChainYield(each.length, each.steps, tokens))
        return yields

    def _chains(self, option: Option, costs: Sequence[float], step: float) -> list[DraftLength]:
        """Every draft length, if a draft step costs `step`."""
        chains = list[DraftLength]()
        for each in self._yields(option):
            time = each.steps * step + costs[min(round(each.steps), len(costs) - 1)]
            cost = each.length * step + costs[min(each.length, len(costs) - 1)]
            chains.append(DraftLength(each.tokens / time * self._frontier.correction, each.length, cost))
        return chains

    def _plan(self, option: Option, chain: DraftLength, costs: Sequence[float], most_cost: float) -> Plan:
        """Plan the chain, with as many other rows as the rest of `most_cost` covers."""
        entry = option.entry
        masked = Masked(entry.mask, option.threshold, UNSURE)
        drafter = self.extended(masked, chain, entry.profile.token_agreement, costs, most_cost)
        return Plan(
            reason=f"draft with {entry.name}",
            drafter=drafter,
            draft_length=chain.length + DEEPEST,
            entry=entry.name,
            mask=entry.mask,
        )


def _length_stats(option: Option) -> list[_LengthStats]:
    """Statistics of the profile's draft lengths, at the option's threshold."""
    profile = option.entry.profile
    column = profile.thresholds.index(option.threshold)
    stats = list[_LengthStats]()
    shorter = 0
    most = 1.0
    for row, length in enumerate(profile.draft_lengths):
        tokens = float(profile.tokens[row, column])
        stats.append(
            _LengthStats(
                length=length,
                steps=float(profile.steps[row, column]),
                gain=max(0.0, tokens - most),
                depth=(shorter + 1 + length) / 2,
            )
        )
        shorter = length
        most = max(most, tokens)
    return stats
