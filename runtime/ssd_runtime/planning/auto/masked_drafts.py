"""Masked drafts as one of `auto`'s ways to draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from ssd_profiles.latency import LatencyTable
from ssd_runtime.drafting.combined import DEEPEST, Extended
from ssd_runtime.drafting.lookup import Lookup
from ssd_runtime.drafting.masked import Branching, Masked
from ssd_runtime.planning.auto.draft_stats import MIN_GAIN, DraftStats
from ssd_runtime.planning.auto.offer import Offer
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
        self._option: Option | None = None
        self._length_stats: list[_LengthStats] = []

    def offer(self, context: int, costs: Sequence[float], most_cost: float) -> Offer | None:
        """The mask that is best by latency, at the length that is best as far as the budget covers."""
        option = self._best.at(context)
        if option is None:
            return None
        if option is not self._option:
            self._option, self._length_stats = option, _length_stats(option)
        chains = self._chains(option, costs)
        best = max(chain.speedup for chain in chains)
        if not self.record.update_trust(best):
            return None
        covered = [chain for chain in chains if chain.cost <= most_cost and chain.speedup >= MIN_GAIN]
        if not covered:
            return Offer(self, best)
        chain = max(covered, key=attrgetter("speedup"))
        return Offer(self, best, self._plan(option, chain, costs, most_cost), chain.speedup)

    def learn(self, cycle: Cycle, costs: Sequence[float], plain_seconds: float | None) -> float:
        """Take in which tokens were right, and the time of the draft steps against the verification's."""
        option, pace = self._option, self.record.pace
        assert option is not None, "there was an offer"
        verification, steps = costs[min(cycle.verified, len(costs)) - 1], cycle.steps * option.draft_cost
        spent = cycle.draft_seconds / cycle.verify_seconds * verification if cycle.verify_seconds else steps
        if not cycle.is_cut:
            # Guesses behind a chain are none of its doing.
            right = min(cycle.accepted, cycle.steps)
            tested = right + (right < cycle.steps)
            self.record.update(right, tested * option.entry.profile.token_agreement, spent / steps)
        return verification + steps * pace

    def _chains(self, option: Option, costs: Sequence[float]) -> list[_Chain]:
        """Every draft length as this stream lets one expect it."""
        step, tokens, chains = option.draft_cost * self.record.pace, 1.0, []
        # No token is right more often than always.
        likelier = min(self.record.factor, 1.0 / max(option.entry.profile.token_agreement, 0.5))
        for rung in self._length_stats:
            tokens = min(tokens + rung.gain * likelier**rung.depth, rung.steps + 1.0)
            time = rung.steps * step + costs[min(round(rung.steps), len(costs) - 1)]
            cost = rung.length * step + costs[min(rung.length, len(costs) - 1)]
            chains.append(_Chain(tokens / time * self._correction, rung.length, cost))
        return chains

    def _plan(self, option: Option, chain: _Chain, costs: Sequence[float], most_cost: float) -> Plan:
        entry = option.entry
        agreement = min(1.0, entry.profile.token_agreement * self.record.factor)
        masked, left = Masked(entry.mask, option.threshold, UNSURE), most_cost - chain.cost
        return Plan(
            f"draft with {entry.name}",
            Extended(masked, chain.length, self._lookup, agreement, chain.speedup, tuple(costs), left),
            chain.length + DEEPEST,
            entry.name,
            entry.mask,
            detail=f"{chain.length} tokens, {chain.speedup:.2f}x",
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
