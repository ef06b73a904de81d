"""The load of a scheduler's step: its numbers of sequences and rows."""

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
    step: int = 0
    """The scheduler's number of the step."""
