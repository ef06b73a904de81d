"""A success rate that favours recent cases."""

from __future__ import annotations

from dataclasses import dataclass

KEEP = 0.995
"""Decay per case, since requests change over time."""
PRIOR_WEIGHT = 6.0
"""Number of cases that the prior counts as."""


@dataclass(slots=True)
class Rate:
    """Exponentially decayed share of successes."""

    held: float
    cases: float

    @classmethod
    def prior(cls, share: float) -> Rate:
        """Create a rate from a prior belief."""
        return cls(PRIOR_WEIGHT * share, PRIOR_WEIGHT)

    @property
    def share(self) -> float:
        """Current estimate."""
        return self.held / self.cases

    def update(self, held: bool) -> None:
        """Add one case."""
        self.held = KEEP * self.held + held
        self.cases = KEEP * self.cases + 1.0
