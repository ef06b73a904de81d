"""Early exit as one of `auto`'s ways to draft."""

from __future__ import annotations

from collections.abc import Sequence

from ssd_artifacts.domain_config import ExitChoice
from ssd_profiles.latency import LatencyTable
from ssd_runtime.drafting.early_exit import EarlyExit
from ssd_runtime.model.exit_heads import ExitHeads
from ssd_runtime.planning.auto.draft_source import DraftProposal
from ssd_runtime.planning.auto.draft_stats import MIN_GAIN, DraftStats
from ssd_runtime.planning.by_context import ByContext
from ssd_runtime.planning.cost import CostModel
from ssd_runtime.planning.plan import Cycle, Plan


class ExitDrafts:
    """A domain's tuned early exits, for a sequence that is alone.

    In a shared step, every row that exits at a depth of its own would be a forward that all others wait for.

    Costs by the table assume that all tokens go to the depth bound. A token that exits earlier saves more drafting time
    than its further layers add to the verification. The statistics' pace corrects these costs.
    """

    def __init__(self, heads: ExitHeads, choice: ExitChoice, latency: LatencyTable, stats: DraftStats) -> None:
        self._drafter = EarlyExit(
            heads=heads,
            stops=tuple(choice.stops),
            threshold=choice.threshold,
            annealing=choice.annealing,
        )
        self._width = choice.width
        self._speedup = choice.predicted_speedup
        self.stats = stats
        costs = CostModel(latency)

        def prefixes(context: int) -> tuple[list[float], float]:
            """Costs of 1, 2, … rows up to the depth bound, and of one row with a pass through the head per stop."""
            rows = costs.prefixes(context, layers=choice.stops[-1], most_rows=choice.width + 1)
            return rows, rows[0] + costs.heads(context, len(choice.stops))

        self._prefixes = ByContext(prefixes)

    def propose(self, context: int, costs: Sequence[float], most_cost: float) -> DraftProposal | None:
        """Propose the longest draft, up to the domain's width, that the budget covers."""
        best = self._expected(self._width)
        if not self.stats.update_trust(best):
            return None
        most = most_cost / self.stats.pace
        lengths = (length for length in range(self._width, 0, -1) if self._cost(context, length, costs) <= most)
        length = next(lengths, 0)
        expected = self._expected(length)
        if not length or expected < MIN_GAIN:
            return DraftProposal(self, best)
        plan = Plan("draft by early exit", self._drafter, length)
        return DraftProposal(source=self, best=best, plan=plan, speedup=expected)

    def observe(self, cycle: Cycle, costs: Sequence[float], plain_seconds: float | None) -> float:
        """Update with the cycle's tokens, those predicted for its cost, and its time; returns its cost."""
        cost = self._cost(cycle.context, cycle.steps, costs)
        pace = self.stats.pace
        if not cycle.is_cut:
            seen = cycle.seconds / (cost * plain_seconds) if plain_seconds and not cycle.held else pace
            self.stats.update(len(cycle.tokens), self._promised(cycle.plan.draft_length) * cost, seen)
        return cost * pace

    def _promised(self, length: int) -> float:
        """The compiler's predicted speed-up; a shorter draft has a proportional share of its gain."""
        return 1.0 + (self._speedup - 1.0) * length / self._width

    def _expected(self, length: int) -> float:
        """The predicted speed-up, corrected by this stream's statistics."""
        return self._promised(length) * self.stats.factor / self.stats.pace

    def _cost(self, context: int, length: int, costs: Sequence[float]) -> float:
        """Cost of a cycle of `length` drafts by the table; the pending token goes to the depth bound too."""
        begun, step = self._prefixes.at(context)
        return (length + 1) * step + max(0.0, costs[min(length, len(costs) - 1)] - begun[length])
