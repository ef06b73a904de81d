"""Drafts by early exit as one of `auto`'s ways to draft."""

from __future__ import annotations

from collections.abc import Sequence

from ssd_artifacts.domain_config import ExitChoice
from ssd_profiles.latency import LatencyTable
from ssd_runtime.drafting.early_exit import EarlyExit
from ssd_runtime.model.exit_heads import ExitHeads
from ssd_runtime.planning.auto.draft_stats import MIN_GAIN, DraftStats
from ssd_runtime.planning.auto.offer import Offer
from ssd_runtime.planning.by_context import ByContext
from ssd_runtime.planning.cost import CostModel
from ssd_runtime.planning.plan import Cycle, Plan


class ExitDrafts:
    """A domain's tuned way to leave early, for a sequence that is alone.

    In a shared step every row that leaves at a depth of its own would be a forward that all others wait for.

    By the table, its costs are those of tokens that all go to the depth bound: one that leaves earlier saves more than
    the verification, which then has more layers to go through, takes longer. What cycles take here is learned.
    """

    def __init__(self, heads: ExitHeads, choice: ExitChoice, latency: LatencyTable, record: DraftStats) -> None:
        self._drafter = EarlyExit(heads, tuple(choice.stops), choice.threshold, choice.annealing)
        self._width, self._speedup, self.record = choice.width, choice.predicted_speedup, record
        costs, depth, looks = CostModel(latency), choice.stops[-1], len(choice.stops)

        def prefixes(context: int) -> tuple[list[float], float]:
            """What 1, 2, … rows cost up to the depth bound, and one row with its looks."""
            rows = costs.prefixes(context, depth, choice.width + 1)
            return rows, rows[0] + costs.looks(context, looks)

        self._prefixes = ByContext(prefixes)

    def offer(self, context: int, costs: Sequence[float], most_cost: float) -> Offer | None:
        """Drafts up to the domain's width, as far as the budget covers."""
        best, most = self._expected(self._width), most_cost / self.record.pace
        if not self.record.update_trust(best):
            return None
        lengths = (length for length in range(self._width, 0, -1) if self._cost(context, length, costs) <= most)
        length = next(lengths, 0)
        expected = self._expected(length)
        if not length or expected < MIN_GAIN:
            return Offer(self, best)
        plan = Plan("draft by early exit", self._drafter, length, detail=f"{length} tokens, {expected:.2f}x")
        return Offer(self, best, plan, expected)

    def learn(self, cycle: Cycle, costs: Sequence[float], plain_seconds: float | None) -> float:
        """Take in the cycle's tokens against those that so much work was to bring, and its time."""
        cost, pace = self._cost(cycle.context, cycle.steps, costs), self.record.pace
        if not cycle.is_cut:
            seen = cycle.seconds / (cost * plain_seconds) if plain_seconds else pace
            self.record.update(len(cycle.tokens), self._promised(cycle.plan.draft_length) * cost, seen)
        return cost * pace

    def _promised(self, length: int) -> float:
        """Of the compiler's promise, a shorter draft keeps its share."""
        return 1.0 + (self._speedup - 1.0) * length / self._width

    def _expected(self, length: int) -> float:
        """What is left of the promise in this stream."""
        return self._promised(length) * self.record.factor / self.record.pace

    def _cost(self, context: int, length: int, costs: Sequence[float]) -> float:
        """Of a cycle of so many drafts by the table, in plain steps: the pending token goes to the depth bound, too."""
        begun, step = self._prefixes.at(context)
        return (length + 1) * step + max(0.0, costs[min(length, len(costs) - 1)] - begun[length])
