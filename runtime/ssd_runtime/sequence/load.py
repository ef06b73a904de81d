"""The load of a scheduler's step: its sequences, their rows and what these attend to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Load:
    """The sequences and rows of a step of the scheduler.

    They share one forward of the full model, except for those whose states are kept or whose drafts have begun it.
    """

    sequences: int = 1
    rows: int = 1
    """Rows of all sequences together."""
    context: int = 0
    """Mean number of the sequences' committed tokens, to which their rows attend."""
    step: int = 0
    """Number of the step among those of the scheduler with a forward of the full model."""
