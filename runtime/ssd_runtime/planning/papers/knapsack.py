"""KnapSpec searches for the mask again and again while it decodes, on the latest tokens' hidden states."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ssd_profiles.formulas import tokens_per_time
from ssd_profiles.latency import LatencyTable
from ssd_runtime.model.runner import Work
from ssd_runtime.planning.frontier import Frontier
from ssd_runtime.planning.papers.knn import NearestAnchorPlanner
from ssd_runtime.planning.papers.refreshed import RefreshedPlanner
from ssd_runtime.planning.plan import Cycle, Plan, Planner
from ssd_runtime.planning.settings import KnapsackSettings, NearestSettings
from ssd_runtime.planning.strategy import MakePlanner, StrategyInputs
from ssd_runtime.search.knapsack import Candidate, searching_knapsack
from ssd_runtime.search.weights import Weights
from ssd_runtime.sequence.session import Session

PIECE_ROWS = 256
"""Most rows of one request of a search, so that others do not wait for long; a budget's rows stay together."""
MOST_STATES = 16384
"""Most states that a search keeps for a sub-layer, which take hundreds of MiB in large models."""
FEWEST_ROWS = 4
"""Least tokens of a search, however little time it has: fewer do not tell right masks from lucky ones."""


class KnapsackPlanner(RefreshedPlanner):
    """Plans the mask with the most tokens/s on the latest tokens' states (KnapSpec §3.5).

    The paper assumes a GPU that runs all budgets and tokens of a search in the time of one. On other devices a search
    looks at the latest tokens only, as many as its share of the time allows.
    """

    def __init__(self, latency: LatencyTable, settings: KnapsackSettings, warm: Planner | None = None) -> None:
        super().__init__(settings.window, settings.refresh, settings.max_draft, warm)
        self._latency = latency
        self._settings = settings
        self._seconds = 0.0
        self._all_cycles = 0

    def observe(self, cycle: Cycle, states: list[Tensor] | None) -> None:
        """Keep the states, and sum the cycles' seconds, of which a search may take its share."""
        super().observe(cycle, states)
        self._all_cycles += 1
        self._seconds += cycle.seconds

    def replanning(self, session: Session, context: int) -> Work[Plan]:
        """Search for the masks of all budgets; returns the plan with the highest TPT."""
        weights = Weights.of(self._latency, context)
        settings = self._settings
        reference = yield from self._recent.referencing(session, self._affordable(weights, context))
        found = yield from searching_knapsack(
            decoder=session.decoder,
            reference=reference,
            weights=weights,
            threshold=settings.similarity,
            budget=settings.budget,
            most=settings.states,
            piece=PIECE_ROWS,
        )
        return self._best(found, context)

    def _best(self, candidates: Sequence[Candidate], context: int) -> Plan:
        """The plan with the highest TPT."""
        verify = [self._latency.step_seconds(context, rows) for rows in range(2, self._settings.max_draft + 2)]
        return max((self._rated(each, context, verify) for each in candidates), key=lambda rated: rated[0])[1]

    def _affordable(self, weights: Weights, context: int) -> int:
        """Number of tokens that a search can look at within its share of the time until the next."""
        allowed = self._settings.share * self._settings.refresh * self._seconds / max(1, self._all_cycles)
        # The number of budgets grows from the first sub-layer to the last, so half of them are the average.
        budgets = max(1.0, self._settings.budget * sum(weights.items) / 2)
        if self._settings.states:
            budgets = min(budgets, float(self._settings.states))
        rows = max(FEWEST_ROWS, min(self._recent.tokens, int(MOST_STATES / budgets)))
        if self._settings.share >= 1.0:
            return rows
        while rows > FEWEST_ROWS and self._search_seconds(rows * budgets, context) > allowed:
            rows -= 1
        return rows

    def _search_seconds(self, states: float, context: int) -> float:
        """Seconds to run `states` states at once through every sub-layer and the head."""
        return sum(self._latency.sublayer_seconds(context, states)) + self._latency.head_seconds(states)

    def _rated(self, candidate: Candidate, context: int, verify: Sequence[float]) -> tuple[float, Plan]:
        """The candidate's highest TPT over draft lengths, and its plan.

        `verify` are the measured seconds of verifying 1, 2, … drafted tokens.
        """
        if not any(candidate.mask.skipped):
            rate = 1.0 / self._latency.step_seconds(context)
            return rate, Plan(f"plain: no mask is predicted to beat {rate:.1f} tokens/s")
        draft = self._latency.step_seconds(context, 1, candidate.mask)

        def rate_of(length: int) -> float:
            return tokens_per_time(
                token_agreement=candidate.token_agreement,
                draft_length=length,
                draft_seconds=draft,
                verify_seconds=verify[length - 1],
            )

        rate, length = max((rate_of(length), length) for length in range(1, self._settings.max_draft + 1))
        threshold = self._settings.confidence
        skipped = candidate.mask.mixers_skipped + candidate.mask.mlps_skipped
        plan = Plan.masked(
            reason=f"knapsack skips {skipped} of {len(candidate.mask)}: {rate:.1f} tokens/s predicted",
            mask=candidate.mask,
            draft_length=self._settings.max_draft if threshold > 0 else length,
            threshold=threshold,
            entry="knapsack",
        )
        return rate, plan


def make_knapsack(inputs: StrategyInputs) -> MakePlanner:
    """Return a maker of KnapSpec planners, which start with a bundle's masks unless `warm_start` is 0."""
    latency = inputs.measured_latency
    settings = inputs.settings
    router = inputs.make_router()
    if router is None or not settings.warm_start:
        return lambda: KnapsackPlanner(latency, settings)
    frontiers = Frontier.of_all(inputs.domains, inputs.num_layers, latency)

    def make() -> KnapsackPlanner:
        # Its own searches choose between masks and plain steps too, so masks that promise no gain are left out.
        warm = NearestAnchorPlanner(
            frontiers=frontiers,
            router=router,
            latency=latency,
            settings=NearestSettings(),
            least_speedup=1.0,
        )
        return KnapsackPlanner(latency, settings, warm)

    return make
