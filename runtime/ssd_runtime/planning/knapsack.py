"""KnapSpec on the fly: the mask is searched again every so often on the latest tokens' hidden states."""

from __future__ import annotations

from torch import Tensor

from ssd_profiles.formulas import tokens_per_time
from ssd_profiles.latency import LatencyTable
from ssd_runtime.knapsack import Candidate, Weights, search_knapsack
from ssd_runtime.planning.plan import BasePlanner, Cycle, PlainPlanner, Plan, Planner
from ssd_runtime.planning.recent import RecentStates
from ssd_runtime.planning.settings import KnapsackSettings
from ssd_runtime.session import Prefill, Session


class KnapsackPlanner(BasePlanner):
    """What `first` plans until there are states to search on, then the mask of most tokens a second (KnapSpec §3.5)."""

    wants_states = True

    def __init__(self, latency: LatencyTable, settings: KnapsackSettings, first: Planner | None = None) -> None:
        self._latency, self._settings = latency, settings
        self._first = first or PlainPlanner()
        self._recent = RecentStates(settings.window)
        self._cycles = 0
        self._plan: Plan | None = None
        self._session: Session | None = None

    def start(self, session: Session, prompt: Prefill) -> None:
        """Keep hold of the session whose cache the searches read."""
        self._session = session
        self._first.start(session, prompt)
        self.domain = self._first.domain

    def plan(self, context: int) -> Plan:
        """The plan of the latest search; searches when one is due."""
        ready = len(self._recent) >= self._settings.window
        if ready and (self._plan is None or self._cycles >= self._settings.refresh):
            self._plan, self._cycles = self._search(context), 0
        return self._plan or self._first.plan(context)

    def observe(self, cycle: Cycle, states: list[Tensor] | None) -> None:
        """Keep the states of the tokens that the cycle committed."""
        assert states is not None, "this planner wants states"
        self._recent.add(states)
        self._cycles += 1

    def _search(self, context: int) -> Plan:
        assert self._session is not None, "start() comes first"
        found = search_knapsack(
            self._session.decoder,
            self._recent.reference(self._session),
            Weights.of(self._latency, context),
            self._settings.similarity,
            self._settings.budget,
        )
        return max((self._rated(candidate, context) for candidate in found), key=lambda rated: rated[0])[1]

    def _rated(self, candidate: Candidate, context: int) -> tuple[float, Plan]:
        """The candidate's highest TPT over draft lengths, with the measured time of each verification."""
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
