"""Drafts by early exit as one of `auto`'s ways to draft."""

from __future__ import annotations

from collections.abc import Sequence

from ssd_artifacts.domain_record import ExitChoice
from ssd_profiles.latency import LatencyTable
from ssd_runtime.drafting.early_exit import EarlyExit
from ssd_runtime.exits import ExitHeads
from ssd_runtime.planning.by_context import ByContext
from ssd_runtime.planning.draft_record import DraftRecord
from ssd_runtime.planning.offer import Offer
from ssd_runtime.planning.plan import Cycle, Plan


class ExitDrafts:
    """A domain's tuned way to leave early."""

    def __init__(self, heads: ExitHeads, choice: ExitChoice, latency: LatencyTable, record: DraftRecord) -> None:
        self._drafter = EarlyExit(heads, tuple(choice.stops), choice.threshold, choice.annealing)
        self._width, self._speedup, self.record = choice.width, choice.predicted_speedup, record
        deepest = choice.stops[-1]
        self._depth = deepest / len(latency.layer_kinds)

        def step(context: int) -> float:
            layers = sum(latency.sublayer_seconds(context, 1)[: 2 * deepest])
            return (layers + len(choice.stops) * latency.head_seconds(1)) / latency.step_seconds(context)

        self._steps = ByContext(step)

    def offer(self, context: int, costs: Sequence[float], most_cost: float) -> Offer | None:
        """Drafts up to the domain's width, as far as the budget covers."""
        expected = self.record.trusts(self._speedup)
        lengths = range(self._width, 0, -1)
        length = next((length for length in lengths if self._cost(context, length, costs) <= most_cost), 0)
        if expected is None or not length:
            return None
        plan = Plan("draft by early exit", self._drafter, length, detail=f"{length} tokens, {expected:.2f}x")
        return Offer(self, plan, length, self._speedup, expected)

    def learn(self, offer: Offer, cycle: Cycle, costs: Sequence[float], plain_seconds: float | None) -> float:
        """Take in a cycle's tokens against those that its time was predicted to bring."""
        if len(cycle.tokens) > cycle.accepted and plain_seconds:
            self.record.see(len(cycle.tokens), self._speedup * cycle.seconds / plain_seconds)
        return self._cost(cycle.context, cycle.steps, costs)

    def _cost(self, context: int, length: int, costs: Sequence[float]) -> float:
        """Of a cycle of so many drafts, all of them at the depth bound, in plain steps.

        The pending token goes there as well, and verification goes on from there. Tokens that leave earlier cost less
        by more than the verification then costs more.
        """
        rest = (1.0 - self._depth) * costs[min(length, len(costs) - 1)]
        return (length + 1) * self._steps.at(context) + rest
