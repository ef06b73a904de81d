"""What a way to draft could do in the next cycle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ssd_runtime.planning.auto.draft_stats import DraftStats
from ssd_runtime.planning.plan import Cycle, Plan


@dataclass(frozen=True, slots=True)
class Offer:
    """Drafts that the model could make now."""

    source: Source
    best: float
    """The speed-up expected against plain decoding, by the compiler's measurements and the record, at any length."""
    plan: Plan | None = None
    """The best that the budget covers; None where it covers nothing that gains."""
    speedup: float = 0.0
    """The plan's."""


class Source(Protocol):
    """A way to draft by steps of the model, for one request."""

    @property
    def record(self) -> DraftStats:
        """How it has fared in this stream."""
        ...

    def offer(self, context: int, costs: Sequence[float], most_cost: float) -> Offer | None:
        """The best that it can do with `context` cached tokens; None where no length is expected to gain.

        costs[n] is what verifying n drafts costs; `most_cost` what the cycle may cost. Both in plain steps.
        """
        ...

    def learn(self, cycle: Cycle, costs: Sequence[float], plain_seconds: float | None) -> float:
        """Take in what came of the latest offer; returns what the cycle cost in plain steps, as far as is known now.

        `plain_seconds` is what a plain step takes here and now, where that is known.
        """
        ...
