"""The time that planning a cycle takes."""

from __future__ import annotations

from dataclasses import dataclass

SHARE = 0.1
"""Weight of a new time in the running mean."""
OUTLIER = 3.0
"""Times are clipped at `OUTLIER` times the mean: longer ones come from other processes."""


@dataclass(slots=True)
class PlanningTime:
    """Running mean of the seconds to plan and observe a cycle."""

    seconds: float = 0.0

    def update(self, seconds: float) -> float:
        """Update with a cycle's seconds; returns the mean, which is charged for the cycle."""
        known = self.seconds or seconds
        self.seconds = known + SHARE * (min(seconds, OUTLIER * known) - known)
        return self.seconds
