"""What a measurement raises on a machine that is too busy for it."""

from __future__ import annotations

import os

from ssd_profiles.latency import LatencyTable
from ssd_runtime.profiling.other_work import others_text


class BusyMachineError(Exception):
    """A latency table breaks the law. Its text says how, and what other processes did meanwhile."""

    def __init__(self, breach: str, others: float, coarse: LatencyTable) -> None:
        """Keep a `coarse` table for who cannot wait. `others` is the number of processors that were busy."""
        super().__init__(f"{breach}; {others_text(others, os.cpu_count() or 1)}")
        self.coarse = coarse
