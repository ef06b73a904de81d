"""Measures a machine that may be too busy for it: waits, tries again, and gives up in one line."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import ceil
from time import perf_counter

from ssd_compiler.progress import Reporter, duration
from ssd_profiles.errors import UserError
from ssd_profiles.latency import LatencyTable
from ssd_runtime.profiling.latency import BusyMachineError
from ssd_runtime.profiling.other_work import is_crowded, is_swamped, others_during, others_text

LOOK_SECONDS = 1.0
"""Seconds over which other processes' use of the processors is measured."""
MOST_TRIES = 5
"""Most measurements, for a machine that is noisy for another reason than other processes."""

TOO_BUSY = "this device cannot be measured now"


class TooBusyError(UserError):
    """The machine stayed too busy to be measured for as long as the user waits."""

    def __init__(self, seen: str) -> None:
        """Say what was `seen` at last, and what the user can do."""
        super().__init__(
            f"{TOO_BUSY}: {seen}; end other programs, leave them room with --threads, wait longer with --max-wait and "
            "--resume, or search with --coarse latencies"
        )
        self.seen = seen


@dataclass(frozen=True, slots=True)
class Patience:
    """The seconds that a compile waits for other processes, and whether it then goes on with coarse latencies."""

    seconds: float = 300.0
    coarse: bool = False

    def measured(self, measure: Callable[[], LatencyTable], threads: int, reporter: Reporter) -> LatencyTable:
        """Measure on `threads` threads until a table obeys the law.

        A machine of which others have half is not measured before they end, and after an attempt that failed others
        have to leave room for all threads. Raises TooBusyError after `seconds`.
        """
        deadline = perf_counter() + self.seconds
        processors = os.cpu_count() or 1
        swamped = too_busy = partial(is_swamped, threads=threads, processors=processors)
        for left in reversed(range(MOST_TRIES)):
            others = _others(too_busy, processors, deadline, reporter)
            seen = others_text(others, processors)
            if not swamped(others):
                try:
                    return measure()
                except BusyMachineError as error:
                    seen = str(error)
                    too_busy = partial(is_crowded, threads=threads, processors=processors)
            if not left or perf_counter() >= deadline:
                break
            reporter.note(f"{TOO_BUSY}: {seen}; measuring again")
        raise TooBusyError(seen)


def _others(too_busy: Callable[[float], bool], processors: int, deadline: float, reporter: Reporter) -> float:
    """Number of processors that others keep busy, once these are few enough or the deadline has come."""
    others = others_during(LOOK_SECONDS)
    left = deadline - perf_counter()
    if not too_busy(others) or left <= 0:
        return others
    reporter.note(
        f"{others_text(others, processors)}: waiting for them before this device is measured, {duration(left)} at most "
        "(--max-wait); Ctrl-C stops"
    )
    with reporter.stage("wait for other processes", ceil(left / LOOK_SECONDS)) as tick:
        while too_busy(others) and (left := deadline - perf_counter()) > 0:
            others = others_during(min(LOOK_SECONDS, left))
            tick()
    return others
