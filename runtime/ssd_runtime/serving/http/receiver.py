"""Turns what the engine reports of a request into the events that its listener receives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter

from ssd_runtime.drafting.tree import Origin
from ssd_runtime.engine.observed import Observation
from ssd_runtime.serving.http.metrics import Metrics
from ssd_runtime.serving.http.pending import Block, PendingRequest


@dataclass(slots=True)
class Receiver:
    """Receives a request's cycles, tokens and text, in this order."""

    pending: PendingRequest
    metrics: Metrics
    unreported: list[int] = field(default_factory=list)
    """Tokens that were not reported yet, because their text is held back."""
    origins: list[Origin] = field(default_factory=list)
    """Their origins."""
    _last: float = field(default_factory=perf_counter)
    """Time of the latest tokens."""
    _cycle: Sequence[Origin] = ("plain",)
    """Origins of the next tokens; the very first one comes from the prefill."""

    def cycle(self, observation: Observation) -> None:
        """Note a cycle; its tokens follow."""
        self._cycle = observation.cycle.origins
        self.pending.plain_seconds = observation.plain_seconds
        self.metrics.on_cycle(observation)

    def tokens(self, ids: list[int]) -> None:
        """Note new tokens; their text follows."""
        now = perf_counter()
        if self.pending.first is None:
            self.pending.first = now
        else:
            self.metrics.on_tokens(len(ids), now - self._last)
        self._last = now
        self.unreported += ids
        self.origins += self._cycle

    def write(self, text: str) -> None:
        """Tell a block, unless its text is held back."""
        if text:
            self.pending.tell(Block(text, tuple(self.unreported), tuple(self.origins)))
            self.unreported.clear()
            self.origins.clear()
