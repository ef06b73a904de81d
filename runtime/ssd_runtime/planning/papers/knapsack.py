"""KnapSpec on the fly: the mask is searched again every so often on the latest tokens' hidden states."""

from __future__ import annotations

from torch import Tensor

from ssd_profiles.formulas import tokens_per_time
from ssd_profiles.latency import LatencyTable
from ssd_runtime.engine.session import Session
from ssd_runtime.model.runner import Work
from ssd_runtime.planning.papers.refreshed import RefreshedPlanner
from ssd_runtime.planning.plan import Cycle, Plan, Planner
from ssd_runtime.planning.settings import KnapsackSettings
from ssd_runtime.search.knapsack import Candidate, Weights, searching_knapsack

FEWEST_ROWS = 4
"""Tokens that a search looks at however little time it has: fewer tell right masks from lucky ones badly."""


class KnapsackPlanner(RefreshedPlanner):
    """The mask of most tokens a second on the latest tokens' states (KnapSpec §3.5).

    The paper counts on a GPU that runs all budgets and tokens of a search in the time of one: where that is not so, a
    search looks at the latest tokens alone, as many as its share of the time allows.
    """

    def __init__(self, latency: LatencyTable, settings: KnapsackSettings, warm: Planner | None = None) -> None:
        super().__init__(settings.window, settings.refresh, warm)
        self._latency, self._settings = latency, settings
        self._seconds = 0.0
        self._all_cycles = 0

    def observe(self, cycle: Cycle, states: list[Tensor] | None) -> None:
        """Take the time of cycles, too: a search's share is measured by it."""
        super().observe(cycle, states)
        self._all_cycles += 1
        self._seconds += cycle.seconds

    def replanning(self, session: Session, context: int) -> Work[Plan]:
        """The best of all budgets' masks, by TPT."""
        weights, settings = Weights.of(self._latency, context), self._settings
        reference = yield from self._recent.referencing(session, self._affordable(weights, context))
        found = yield from searching_knapsack(
            session.decoder, reference, weights, threshold=settings.similarity, budget=settings.budget
        )
        return max((self._rated(candidate, context) for candidate in found), key=lambda rated: rated[0])[1]

    def _affordable(self, weights: Weights, context: int) -> int:
        """Tokens that a search can look at within its share of the time until the next."""
        allowed = self._settings.share * self._settings.refresh * self._seconds / max(1, self._all_cycles)
        # Half of all budgets are reached on average: their number grows from the first sub-layer to the last.
        budgets = max(1.0, self._settings.budget * sum(weights.items) / 2)
        rows = self._recent.tokens
        if self._settings.share >= 1.0:
            return rows
        while rows > FEWEST_ROWS and self._search_seconds(rows * budgets, context) > allowed:
            rows -= 1
        return rows

    def _search_seconds(self, states: float, context: int) -> float:
        """What running so many states at once through every sub-layer and the head takes."""
        return sum(self._latency.sublayer_seconds(context, states)) + self._latency.head_seconds(states)

    def _rated(self, candidate: Candidate, context: int) -> tuple[float, Plan]:
        """The candidate's highest TPT over draft lengths, with the measured time of each verification."""
        if not any(candidate.mask.bits):
            rate = 1.0 / self._latency.step_seconds(context)
            return rate, Plan(f"plain: no mask is predicted to beat {rate:.1f} tokens/s")
        draft = self._latency.step_seconds(context, 1, candidate.mask)
        rate, length = max(
            (
                tokens_per_time(candidate.token_agreement, n, draft, self._latency.step_seconds(context, n + 1)),
                n,
            )
            for n in range(1, self._settings.max_draft + 1)
        )
        early = self._settings.confidence
        share = candidate.mask.attention_skipped + candidate.mask.mlp_skipped
        reason = f"knapsack skips {share} of {len(candidate.mask)}: {rate:.1f} tokens/s predicted"
        longest = self._settings.max_draft if early > 0 else length
        return rate, Plan.masked(reason, candidate.mask, longest, early, "knapsack")
