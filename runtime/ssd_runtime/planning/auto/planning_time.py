"""How long deciding on a cycle takes."""

from __future__ import annotations

from dataclasses import dataclass

SHARE = 0.1
"""How much of a new time the mean takes over."""
OUTLIER = 3.0
"""Times beyond so many means count as that many: another process at work says nothing of planning."""


@dataclass(slots=True)
class PlanningTime:
    """Running mean of the seconds that planning a cycle and observing what came of it take."""

    seconds: float = 0.0

    def update(self, seconds: float) -> float:
        """Update with a cycle's; returns the mean, which is what the cycle is charged."""
        known = self.seconds or seconds
        self.seconds = known + SHARE * (min(seconds, OUTLIER * known) - known)
        return self.seconds
