"""Prompt lookup: drafts copied from the prompt and the answer so far."""

from __future__ import annotations

from torch import Tensor

from ssd_profiles.latency import LatencyTable
from ssd_runtime.drafting.lookup import Lookup
from ssd_runtime.planning.plan import BasePlanner, Cycle, Plan
from ssd_runtime.planning.settings import LookupSettings


class LookupPlanner(BasePlanner):
    """A lookup each cycle; where nothing matches, the verification is a plain step."""

    def __init__(self, latency: LatencyTable, settings: LookupSettings) -> None:
        self._lookup = Lookup(latency)
        self._plan = Plan("lookup", self._lookup, settings.max_draft)

    def plan(self, context: int) -> Plan:
        """The same every cycle: how far to draft is decided with the match."""
        return self._plan

    def observe(self, cycle: Cycle, states: list[Tensor] | None) -> None:
        """Let the lookup learn how far its copies hold."""
        self._lookup.observe(cycle.drafted, cycle.accepted)
