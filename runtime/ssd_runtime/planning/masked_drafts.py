"""Masked drafts as one of `auto`'s ways to draft."""

from __future__ import annotations

from collections.abc import Sequence

from ssd_profiles.latency import LatencyTable
from ssd_runtime.drafting.extended import DEEPEST, Extended
from ssd_runtime.drafting.lookup import Lookup
from ssd_runtime.drafting.masked import Masked
from ssd_runtime.planning.draft_record import DraftRecord
from ssd_runtime.planning.frontier import Frontier
from ssd_runtime.planning.offer import Offer
from ssd_runtime.planning.plan import Cycle, Plan
from ssd_runtime.planning.throughput import Option


class MaskedDrafts:
    """The best mask of a domain's frontier, with guesses behind the masked chain."""

    def __init__(self, frontier: Frontier, latency: LatencyTable, record: DraftRecord, lookup: Lookup) -> None:
        self._best, self._correction = frontier.best(latency), frontier.correction
        self.record, self._lookup = record, lookup
        self._option: Option | None = None

    def offer(self, context: int, costs: Sequence[float], most_cost: float) -> Offer | None:
        """The mask that is best by latency, at the length that is best as far as the budget covers."""
        option = self._option = self._best.at(context)
        if option is None:
            return None
        profile, column = option.entry.profile, option.entry.profile.thresholds.index(option.threshold)
        step, best = option.draft_cost * self.record.pace, (0.0, 0, 0.0, 0.0)
        for row, length in enumerate(profile.draft_lengths):
            cost = length * step + costs[min(length, len(costs) - 1)]
            if length > option.draft_length or cost > most_cost:
                break
            tokens, steps = float(profile.tokens[row, column]), float(profile.steps[row, column])
            speedup = tokens / (steps * step + costs[min(round(steps), len(costs) - 1)])
            best = max(best, (speedup, length, tokens, cost))
        speedup, length, tokens, cost = best
        expected = self.record.trusts(speedup * self._correction) if length else None
        if expected is None:
            return None
        masked, left = Masked(option.entry.mask, option.threshold), most_cost - cost
        plan = Plan(
            f"draft {option.draft_length} with {option.entry.name}",
            Extended(masked, length, self._lookup, profile.token_agreement, expected, tuple(costs), left),
            length + DEEPEST,
            option.entry.name,
            option.entry.mask,
            detail=f"{length} tokens, {expected:.2f}x",
        )
        return Offer(self, plan, length, tokens, expected)

    def learn(self, offer: Offer, cycle: Cycle, costs: Sequence[float], plain_seconds: float | None) -> float:
        """Take in a cycle's tokens and the time of its draft steps."""
        option = self._option
        assert option is not None, "it has made an offer"
        cost, steps = costs[min(cycle.verified, len(costs)) - 1], cycle.steps * option.draft_cost
        spent = cycle.draft_seconds / cycle.verify_seconds * cost if cycle.verify_seconds else steps
        whole = cost + steps * self.record.pace
        # What the end of the answer has cut says nothing of the mask; guesses behind a chain are none of its doing.
        uncut = len(cycle.tokens) > cycle.accepted and (option.threshold > 0.0 or cycle.steps == offer.length)
        if uncut:
            self.record.see(min(len(cycle.tokens), cycle.steps + 1), offer.tokens, spent / steps)
        return whole
