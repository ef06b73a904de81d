"""CLaSp: the layers to skip are searched again every so often on the hidden states of the last accepted token."""

from __future__ import annotations

from torch import Tensor

from ssd_runtime.knapsack import Weights, search_knapsack
from ssd_runtime.planning.plan import BasePlanner, Cycle, Plan
from ssd_runtime.planning.recent import RecentStates
from ssd_runtime.planning.settings import ClaspSettings
from ssd_runtime.session import Prefill, Session


class ClaspPlanner(BasePlanner):
    """A plain step for its states, then the mask whose state comes closest to the full model's (CLaSp eq. 2).

    The number of skipped layers is fixed; the paper's eq. 1 prints arg min, its algorithm maximises.
    """

    def __init__(self, settings: ClaspSettings) -> None:
        self._settings = settings
        self.wants_states = True
        self._recent = RecentStates(1)
        self._cycles = 0
        self._plan: Plan | None = None
        self._session: Session | None = None

    def start(self, session: Session, prompt: Prefill) -> None:
        """Keep hold of the session whose cache the searches read."""
        self._session = session

    def plan(self, context: int) -> Plan:
        """The plan of the latest search; searches when one is due."""
        if self._recent.tokens and (self._plan is None or self._cycles >= self._settings.refresh):
            self._plan, self._cycles = self._search(), 0
        return self._plan or Plan("plain: collecting hidden states")

    def observe(self, cycle: Cycle, states: list[Tensor] | None) -> None:
        """Keep the states of the tokens that the cycle committed."""
        if states is not None:
            self._recent.add(states)
        self._cycles += 1
        self.wants_states = self._cycles + 1 >= self._settings.refresh

    def _search(self) -> Plan:
        assert self._session is not None, "start() comes first"
        settings, decoder = self._settings, self._session.decoder
        items = decoder.shape.num_layers * (2 if settings.sublayers else 1)
        count = round(min(settings.skip, 1.0) * items)
        if not count:
            return Plan("plain: there is nothing to skip")
        found = search_knapsack(
            decoder, self._recent.reference(self._session, 1), Weights((1,) * items), threshold=-1.0, exactly=count
        )[0]
        kind = "sub-layers" if settings.sublayers else "layers"
        reason = f"clasp skips {count} of {items} {kind}, cosine {found.cosine:.3f}"
        return Plan.masked(reason, found.mask, settings.max_draft, settings.confidence, "clasp")
