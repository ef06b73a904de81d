"""How often something has held lately."""

from __future__ import annotations

from dataclasses import dataclass

KEEP = 0.995
"""What share of its record one more case leaves: requests change as they go."""
PRIOR_WEIGHT = 6.0
"""Cases that the prior counts for."""


@dataclass(slots=True)
class Rate:
    """A share of cases, old ones counting less."""

    held: float
    cases: float

    @classmethod
    def prior(cls, share: float) -> Rate:
        """What is believed before anything was seen."""
        return cls(PRIOR_WEIGHT * share, PRIOR_WEIGHT)

    @property
    def share(self) -> float:
        """The share now."""
        return self.held / self.cases

    def update(self, held: bool) -> None:
        """One more case."""
        self.held = KEEP * self.held + held
        self.cases = KEEP * self.cases + 1.0
