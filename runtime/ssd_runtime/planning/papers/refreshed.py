"""A planner that searches for its plan again and again, on the full model's latest hidden states."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from ssd_artifacts.domain_config import MAX_DRAFT
from ssd_runtime.model.runner import Work
from ssd_runtime.planning.papers.recent import RecentStates
from ssd_runtime.planning.plan import ConstantPlanner, Cycle, Plan, Planner
from ssd_runtime.sequence.prefill import Prefill
from ssd_runtime.sequence.session import Session

COLLECTING = Plan("plain: collecting hidden states")


class RefreshedPlanner(Planner, ABC):
    """Searches every `refresh` cycles, on the tokens that the `window` cycles before committed.

    Until the first search it plans as `warm` does, which does not search itself. Without `warm` it plans plain steps
    until there are enough states.
    """

    def __init__(self, window: int, refresh: int, longest: int, warm: Planner | None = None) -> None:
        """`longest` is the longest draft of its own plans; those of `warm` are a bundle's."""
        self._window = window
        self._cycle_tokens = 1 + max(longest, MAX_DRAFT if warm is not None else 0)
        """Most tokens that a cycle commits."""
        self._refresh = refresh
        self._first: Planner = warm or ConstantPlanner(COLLECTING)
        self._at_once = warm is None
        self._recent = RecentStates(window)
        self._cycles = 0
        self._plan: Plan | None = None
        self._session: Session | None = None

    @property
    def wants_states(self) -> bool:
        """Whether the next cycle is one of the `window` before a search."""
        return self._at_once or self._cycles + self._window >= self._refresh

    def start(self, session: Session, prompt: Prefill) -> None:
        """Keep the session, whose cache the searches read."""
        self._session = session
        session.look_back(self._window * self._cycle_tokens)
        self._first.start(session, prompt)
        self.domain = self._first.domain

    def searching(self, context: int) -> Work[None]:
        """Search again if it is due."""
        if len(self._recent) >= self._window and (self._at_once or self._cycles >= self._refresh):
            assert self._session is not None, "start() comes first"
            self._plan = yield from self.replanning(self._session, context)
            self._cycles = 0
            self._at_once = False

    def plan(self, context: int) -> Plan:
        """Return the plan of the latest search."""
        return self._plan or self._first.plan(context)

    def observe(self, cycle: Cycle, states: list[Tensor] | None) -> None:
        """Keep the states of the tokens that the cycle committed."""
        if states is not None:
            self._recent.add(states)
        self._cycles += 1

    def finish(self) -> None:
        """Release the session."""
        self._session = None

    @abstractmethod
    def replanning(self, session: Session, context: int) -> Work[Plan]:
        """Search for a new plan on the kept states."""
