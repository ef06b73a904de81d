"""A clock that tests set the pace of."""

from __future__ import annotations

from collections.abc import Callable

import torch


class StandInClock:
    """Stands in for `seconds` and `perf_counter` of the profiling: any work takes `pace` seconds."""

    def __init__(self, pace: float) -> None:
        self.pace = pace
        self.works = 0

    def seconds(self, work: Callable[[], object], device: torch.device) -> float:
        """The seconds of a work, which is not done."""
        self.works += 1
        return self.pace

    def now(self) -> float:
        """The seconds of all works so far."""
        return self.works * self.pace
