"""What verifications take here and now, beside what the latency table says of them."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np
from numpy.typing import NDArray

ABOUT = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24)
"""Numbers of rows that are told apart: of those between two, the greater counts; of more, the last."""
SURPRISE = 0.25
"""Most that one verification counts for, as a logarithm: a step that something else held up says nothing."""
DRIFT, OWN, FIRST = 0.2, 0.05, 5
"""What share of a surprise is laid to the machine's pace, and to that number of rows: at first one in `FIRST`, and
little to the pace."""

LAZY = 8
"""Costs are priced again when so many more verifications of some number of rows were seen: it takes a while."""

MOST_ROWS = 256
"""Rows that are corrected one by one; of more, the last correction holds."""
SETTLING = 3
"""Plain steps that the pace is first taken from: the very first may have been held up."""


@dataclass(slots=True)
class _Excess:
    """Of about so many rows."""

    log: float = 0.0
    """Of what they take beyond the table."""
    seen: int = 0


@dataclass(slots=True)
class VerifyStats:
    """Times of verifications against the table's, by number of rows.

    The table was measured once, on chains and the arg max of their rows; trees, sampling and the neighbours in the
    processor's cache are seen here. A machine that gets slower as a whole changes no choice: its
    pace is followed apart, and plain steps tell it from the cost of rows.
    """

    _pace: float = 0.0
    """Log of seconds ÷ plain steps by the table, of late."""
    _first: list[float] = field(default_factory=list)
    """The same of the first verifications."""
    rows: dict[int, _Excess] = field(default_factory=lambda: {1: _Excess()})
    """By number; that of one row is 0, and between those seen it is on a line."""
    _factors: NDArray[np.float64] | None = None
    """What 1, 2, … rows take ÷ what the table says."""
    _priced: tuple[Sequence[float], list[float]] | None = None
    """Costs by the table from one row on, and what became of them."""

    @property
    def settled(self) -> bool:
        """Whether the pace is known: until then plain steps are due."""
        return len(self._first) >= SETTLING

    @property
    def plain_seconds(self) -> float | None:
        """What a plain step takes of late; None where nothing was verified yet."""
        return math.exp(self._pace) if self._first else None

    def update(self, rows: int, seconds: float, cost: float) -> None:
        """One more verification: its time, and what the table says of it in plain steps."""
        if min(seconds, cost) <= 0.0:
            return
        about = ABOUT[bisect_left(ABOUT, rows, hi=len(ABOUT) - 1)]
        excess = self.rows.get(about) or _Excess(float(self._beyond(about)))
        found = math.log(seconds) - math.log(cost) - excess.log
        if not self.settled:
            # Nothing is laid to rows before the pace is known.
            self._first.append(found)
            self._pace = median(self._first)
            return
        nll = min(max(found - self._pace, -SURPRISE), SURPRISE)
        told = 1.0 if about == 1 else excess.seen / (excess.seen + FIRST)
        self._pace += DRIFT * told * nll
        if about > 1:
            excess.log += max(OWN, 1 / (FIRST + excess.seen)) * nll
            excess.seen += 1
            self.rows[about] = excess
            if excess.seen <= FIRST or excess.seen % LAZY == 0:
                self._priced = None

    def priced(self, costs: Sequence[float], first: int = 1) -> list[float]:
        """The table's costs of `first`, `first` + 1, … rows, corrected; more rows never cost less."""
        if first == 1 and self._priced is not None and self._priced[0] is costs:
            return self._priced[1]
        if first == 1 or self._priced is None or self._factors is None:
            self._factors = np.exp(self._beyond(np.arange(1, MOST_ROWS + 1)))
        # Beyond the rows that are told apart, the correction is that of the last.
        factors = self._factors[min(first, MOST_ROWS) - 1 : first - 1 + len(costs)]
        if len(factors) < len(costs):
            factors = self._factors[-1]
        corrected: list[float] = np.maximum.accumulate(np.asarray(costs) * factors).tolist()
        self._priced = (costs, corrected) if first == 1 else self._priced or ((), [])
        return corrected

    def _beyond(self, rows: NDArray[np.int64] | int) -> NDArray[np.float64] | float:
        """Log of what so many rows take beyond the table."""
        known = sorted(self.rows)
        return np.interp(rows, known, [self.rows[number].log for number in known])
