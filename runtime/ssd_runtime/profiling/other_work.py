"""Other processes' use of the processors, which makes decoding slow where threads wait for each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter

import psutil

FEWEST = 0.5
"""Processors that others must keep busy before a user is told."""


@dataclass(frozen=True, slots=True)
class OtherWork:
    """Measures how many processors other processes keep busy from now on."""

    began: float = field(default_factory=perf_counter)
    system: float = field(default_factory=lambda: _system_seconds())
    own: float = field(default_factory=lambda: _own_seconds())

    def processors(self) -> float:
        """Number of processors that others have kept busy on average since the start."""
        elapsed = perf_counter() - self.began
        return max(0.0, _system_seconds() - self.system - (_own_seconds() - self.own)) / elapsed if elapsed else 0.0


def busy_note(others: float, threads: int, processors: int) -> str | None:
    """A line for a user whose threads will wait for processors that others keep busy; None where they will not."""
    free = max(1, round(processors - others))
    if others < FEWEST or threads <= free:
        return None
    return (
        f"other processes keep {others:.1f} of {processors} processors busy, which can make {threads} threads many "
        f"times slower than fewer; --threads {free} leaves room for them"
    )


def _system_seconds() -> float:
    """Seconds that all processors together have worked since the system's start."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0))


def _own_seconds() -> float:
    """Processor seconds of this process, and of its children that have ended."""
    return float(sum(psutil.Process().cpu_times()[:4]))
