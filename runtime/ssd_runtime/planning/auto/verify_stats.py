"""Statistics of verification times, which correct the latency table."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np
from numpy.typing import NDArray

ABOUT = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64)
"""Numbers of rows with a correction of their own. Another number counts as the next greater one. More rows than the
last are a prompt's for the most part, and correct nothing once the pace is known."""
MOST_DEVIATION = 0.25
"""Largest log ratio that one verification counts with: longer delays come from other processes."""
DRIFT = 0.2
"""Share of a deviation that changes the machine's pace."""
OWN = 0.05
"""Least share of a deviation that changes the correction of its number of rows."""
FIRST = 5
"""Pseudo-count: after `FIRST` verifications a number of rows has weight 1/2 in the pace. Its own correction starts with
step size 1 / `FIRST`."""

FORGET = 1 / 8
"""Share of a correction that is forgotten after `PERIOD` verifications without its number of rows: rows that seem too
dear are not tried again, which would confirm for good what a busy hour has measured."""
PERIOD = 64
"""Verifications of any number of rows between two times of forgetting."""
LAZY = 8
"""Costs are computed again after every `LAZY` verifications of one number of rows, since that takes time."""

CORRECTED_ROWS = 256
"""Largest number of rows with a correction; more rows have the same."""
SETTLING = 3
"""Number of plain steps whose median is the first pace, because the very first step may have been delayed."""


@dataclass(slots=True)
class _Excess:
    """Correction of one number of rows."""

    log: float = 0.0
    """Log of the time ÷ that of the table, at the machine's pace."""
    seen: int = 0
    """Verifications of that number of rows."""
    fresh: bool = True
    """Whether there was one in this `PERIOD`."""


@dataclass(slots=True)
class VerifyStats:
    """Times of verifications ÷ those of the table, by number of rows.

    The table was measured once, on chains and the arg max of their rows. Trees, sampling and other use of the
    processor's cache are seen only here. A machine that gets slower as a whole changes no choice: its pace is a
    separate statistic, and plain steps tell it from the cost of rows.
    """

    _pace: float = 0.0
    """Log of recent seconds ÷ those of the table."""
    _first: list[float] = field(default_factory=list)
    """Values of the pace in the first verifications."""
    rows: dict[int, _Excess] = field(default_factory=lambda: {1: _Excess()})
    """Log correction by number of rows: 0 at one row, linearly interpolated."""
    _factors: NDArray[np.float64] | None = None
    """Corrections of 1, 2, …, `CORRECTED_ROWS` rows, as factors; None once verifications have changed them."""
    _updates: int = 0
    """Verifications since the pace was known."""
    _priced: tuple[Sequence[float], list[float]] | None = None
    """Costs of 1, 2, … rows by the table, and the corrected ones; None if `_factors` has corrected none."""

    @property
    def settled(self) -> bool:
        """Whether the pace is known; until then plain steps are needed."""
        return len(self._first) >= SETTLING

    @property
    def pace(self) -> float | None:
        """Recent seconds of steps ÷ those of the table; None before the first verification."""
        return math.exp(self._pace) if self._first else None

    def update(self, rows: int, seconds: float, expected: float) -> None:
        """Update with a verification: its rows, its seconds, and those of the table."""
        if min(seconds, expected) <= 0.0:
            return
        about = ABOUT[bisect_left(ABOUT, rows, hi=len(ABOUT) - 1)]
        excess = self.rows.get(about) or _Excess(float(self._beyond(about)))
        found = math.log(seconds) - math.log(expected) - excess.log
        if not self.settled:
            # Corrections of rows need a known pace.
            self._first.append(found)
            self._pace = median(self._first)
            return
        if rows > ABOUT[-1]:
            return
        deviation = min(max(found - self._pace, -MOST_DEVIATION), MOST_DEVIATION)
        known = 1.0 if about == 1 else excess.seen / (excess.seen + FIRST)
        self._pace += DRIFT * known * deviation
        if about > 1:
            excess.log += max(OWN, 1 / (FIRST + excess.seen)) * deviation
            excess.seen += 1
            excess.fresh = True
            self.rows[about] = excess
            if excess.seen <= FIRST or excess.seen % LAZY == 0:
                self._factors = self._priced = None
        self._updates += 1
        if self._updates % PERIOD == 0:
            self._forget()

    def _forget(self) -> None:
        """Forget a part of the corrections that no verification has confirmed lately."""
        for excess in self.rows.values():
            excess.log *= 1.0 if excess.fresh else 1.0 - FORGET
            excess.fresh = False
        self._factors = self._priced = None

    def priced(self, costs: Sequence[float], first: int = 1) -> list[float]:
        """Corrected costs of `first`, `first` + 1, … rows, from the table's `costs`; more rows never cost less."""
        if first == 1 and self._priced is not None and self._priced[0] is costs:
            return self._priced[1]
        if first == 1 or self._factors is None:
            self._factors = np.exp(self._beyond(np.arange(1, CORRECTED_ROWS + 1)))
        factors = self._factors[min(first, CORRECTED_ROWS) - 1 : first - 1 + len(costs)]
        if len(factors) < len(costs):
            factors = self._factors[-1]
        corrected: list[float] = np.maximum.accumulate(np.asarray(costs) * factors).tolist()
        if first == 1:
            self._priced = costs, corrected
        return corrected

    def _beyond(self, rows: NDArray[np.int64] | int) -> NDArray[np.float64] | float:
        """Log corrections of these numbers of rows."""
        known = sorted(self.rows)
        return np.interp(rows, known, [self.rows[number].log for number in known])
