"""Masked drafts as one of `auto`'s ways to draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ssd_profiles.latency import LatencyTable
from ssd_runtime.drafting.extended import DEEPEST, Extended
from ssd_runtime.drafting.lookup import Lookup
from ssd_runtime.drafting.masked import Masked
from ssd_runtime.planning.draft_record import DraftRecord
from ssd_runtime.planning.frontier import Frontier
from ssd_runtime.planning.offer import Offer
from ssd_runtime.planning.plan import Cycle, Plan
from ssd_runtime.planning.throughput import Option


@dataclass(frozen=True, slots=True)
class _Chain:
    """What was offered last."""

    option: Option
    length: int
    tokens: float
    """Predicted of the cycle, by the mask's acceptance profile."""


class MaskedDrafts:
    """The best mask of a domain's frontier, with guesses behind the masked chain."""

    def __init__(self, frontier: Frontier, latency: LatencyTable, record: DraftRecord, lookup: Lookup) -> None:
        self._best, self._correction = frontier.best(latency), frontier.correction
        self.record, self._lookup = record, lookup
        self._offered: _Chain | None = None

    def offer(self, context: int, costs: Sequence[float], most_cost: float) -> Offer | None:
        """The mask that is best by latency, at the length that is best as far as the budget covers."""
        option = self._best.at(context)
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
        self._offered = _Chain(option, length, tokens)
        masked, left = Masked(option.entry.mask, option.threshold), most_cost - cost
        plan = Plan(
            f"draft {option.draft_length} with {option.entry.name}",
            Extended(masked, length, self._lookup, profile.token_agreement, expected, tuple(costs), left),
            length + DEEPEST,
            option.entry.name,
            option.entry.mask,
            detail=f"{length} tokens, {expected:.2f}x",
        )
        return Offer(self, plan, expected)

    def learn(self, cycle: Cycle, costs: Sequence[float]) -> float:
        """Take in the cycle's tokens against those predicted, and the time of its draft steps."""
        offered = self._offered
        assert offered is not None, "there was an offer"
        option, pace = offered.option, self.record.pace
        verification, steps = costs[min(cycle.verified, len(costs)) - 1], cycle.steps * option.draft_cost
        # What the end of the answer has cut says nothing of the mask; guesses behind a chain are none of its doing.
        if len(cycle.tokens) > cycle.accepted and (option.threshold > 0.0 or cycle.steps == offered.length):
            spent = cycle.draft_seconds / cycle.verify_seconds * verification if cycle.verify_seconds else steps
            self.record.see(min(len(cycle.tokens), cycle.steps + 1), offered.tokens, spent / steps)
        return verification + steps * pace
