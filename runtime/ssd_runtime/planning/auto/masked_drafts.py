"""Masked drafts as one of `auto`'s ways to draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from ssd_profiles.latency import LatencyTable
from ssd_profiles.mask import SkipMask
from ssd_runtime.drafting.combined import DEEPEST, Extended
from ssd_runtime.drafting.lookup import Lookup
from ssd_runtime.drafting.masked import Branching, Masked
from ssd_runtime.planning.auto.draft_stats import MIN_GAIN, DraftStats
from ssd_runtime.planning.auto.offer import Offer
from ssd_runtime.planning.auto.shared_step import ChainYield, Share
from ssd_runtime.planning.cost import Option
from ssd_runtime.planning.papers.knn import Frontier
from ssd_runtime.planning.plan import Cycle, Plan

UNSURE: Branching = ((0.5, 2),)
"""Where the masked model gives its token no more than this, its second candidate may be verified, too."""


@dataclass(frozen=True, slots=True)
class _LengthStats:
    """A draft length, by the mask's acceptance profile at its confidence threshold."""

    length: int
    steps: float
    """Draft steps a cycle."""
    gain: float
    """Tokens a cycle beyond those of the next shorter length, or beyond one."""
    depth: float
    """How many drafted tokens, on average, must be right for one of these."""


@dataclass(frozen=True, slots=True)
class _Chain:
    """A draft of some length, and what it is worth now."""

    speedup: float
    length: int
    cost: float
    """If everything fails, in plain steps."""


class MaskedDrafts:
    """The best mask of a domain's frontier, with guesses behind the masked chain and second candidates beside it.

    The record is of tokens that were right ÷ those that the mask's token agreement predicts. What one token more or
    less often right means for a whole draft follows from it: drafts get shorter where the text is hard, and longer
    where it is easy.
    """

    def __init__(self, frontier: Frontier, latency: LatencyTable, record: DraftStats, lookup: Lookup) -> None:
        self._best, self._correction = frontier.best(latency), frontier.correction
        self.record, self._lookup = record, lookup
        self._frontier = frontier
        self._option: Option | None = None
        self._length_stats: list[_LengthStats] = []
        self._share: Share | None = None
        """The latest offer's part in a shared step; None where it was made for a sequence that is alone."""

    def offer(self, context: int, costs: Sequence[float], most_cost: float) -> Offer | None:
        """The mask that is best by latency, at the length that is best as far as the budget covers."""
        self._share, option = None, self._refreshed(context)
        if option is None:
            return None
        chains = self._chains(option, costs, option.draft_cost * self.record.pace)
        best = max(chain.speedup for chain in chains)
        if not self.record.update_trust(best):
            return None
        covered = [chain for chain in chains if chain.cost <= most_cost and chain.speedup >= MIN_GAIN]
        if not covered:
            return Offer(self, best)
        chain = max(covered, key=attrgetter("speedup"))
        return Offer(self, best, self._plan(option, chain, costs, most_cost), chain.speedup)

    def yields(self, context: int, sequences: int) -> tuple[SkipMask, tuple[ChainYield, ...]] | None:
        """The mask that is best by latency, and what its chains yield, for a step that so many sequences share.

        None where the domain has no masks, or where validation measured that they do not pay at such a load.
        """
        option = self._refreshed(context) if self._frontier.pays_at(sequences) else None
        if option is None:
            return None
        corrected = [
            ChainYield(each.length, each.steps, each.tokens * self._correction) for each in self._yields(option)
        ]
        return option.entry.mask, tuple(corrected)

    def take_part(self, share: Share, costs: Sequence[float], most_cost: float) -> Offer | None:
        """The offer of a part in a shared step; None where it is of another mask, or the budget does not cover it."""
        option, step = self._option, share.step_cost * self.record.pace
        if option is None or option.entry.mask != share.mask:
            return None
        chain = next((each for each in self._chains(option, costs, step) if each.length == share.length), None)
        if chain is None or chain.cost > most_cost:
            return None
        self._share = share
        plan = self._plan(option, chain, costs, most_cost, f" with others at {share.step_cost:.2f} plain steps a step")
        return Offer(self, chain.speedup, plan, chain.speedup)

    def learn(self, cycle: Cycle, costs: Sequence[float], plain_seconds: float | None) -> float:
        """Take in which tokens were right, and the time of the draft steps against the verification's.

        In a shared step that time is not this sequence's own: all its planned steps are charged, and none tells a pace.
        """
        option, pace, share = self._option, self.record.pace, self._share
        assert option is not None, "there was an offer"
        verification = costs[min(cycle.verified, len(costs)) - 1]
        steps = cycle.steps * option.draft_cost if share is None else share.length * share.step_cost
        spent = steps * pace
        if share is None:
            spent = cycle.draft_seconds / cycle.verify_seconds * verification if cycle.verify_seconds else steps
        if not cycle.is_cut:
            # Guesses behind a chain are none of its doing.
            right = min(cycle.accepted, cycle.steps)
            tested = right + (right < cycle.steps)
            self.record.update(right, tested * option.entry.profile.token_agreement, spent / steps)
        return verification + steps * pace

    def _refreshed(self, context: int) -> Option | None:
        """The frontier's best here, with the statistics of its lengths."""
        option = self._best.at(context)
        if option is not None and option is not self._option:
            self._option, self._length_stats = option, _length_stats(option)
        return option

    def _yields(self, option: Option) -> list[ChainYield]:
        """What every draft length yields, as this stream lets one expect it."""
        tokens, yields = 1.0, list[ChainYield]()
        # No token is right more often than always.
        likelier = min(self.record.factor, 1.0 / max(option.entry.profile.token_agreement, 0.5))
        for each in self._length_stats:
            tokens = min(tokens + each.gain * likelier**each.depth, each.steps + 1.0)
            yields.append(ChainYield(each.length, each.steps, tokens))
        return yields

    def _chains(self, option: Option, costs: Sequence[float], step: float) -> list[_Chain]:
        """Every draft length, where a draft step costs `step`."""
        chains = list[_Chain]()
        for each in self._yields(option):
            time = each.steps * step + costs[min(round(each.steps), len(costs) - 1)]
            cost = each.length * step + costs[min(each.length, len(costs) - 1)]
            chains.append(_Chain(each.tokens / time * self._correction, each.length, cost))
        return chains

    def _plan(self, option: Option, chain: _Chain, costs: Sequence[float], most_cost: float, how: str = "") -> Plan:
        entry = option.entry
        agreement = min(1.0, entry.profile.token_agreement * self.record.factor)
        masked, left = Masked(entry.mask, option.threshold, UNSURE), most_cost - chain.cost
        return Plan(
            f"draft with {entry.name}",
            Extended(masked, chain.length, self._lookup, agreement, chain.speedup, tuple(costs), left),
            chain.length + DEEPEST,
            entry.name,
            entry.mask,
            detail=f"{chain.length} tokens, {chain.speedup:.2f}x{how}",
        )


def _length_stats(option: Option) -> list[_LengthStats]:
    """The lengths of the profile, at the option's threshold."""
    profile, rungs = option.entry.profile, list[_LengthStats]()
    column = profile.thresholds.index(option.threshold)
    shorter, before = 0, 1.0
    for row, length in enumerate(profile.draft_lengths):
        tokens = float(profile.tokens[row, column])
        depth = (shorter + 1 + length) / 2
        rungs.append(_LengthStats(length, float(profile.steps[row, column]), max(0.0, tokens - before), depth))
        shorter, before = length, max(before, tokens)
    return rungs
