"""Other processes' use of the processors, which makes decoding slow where threads wait for each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter, sleep

import psutil
import torch

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


def others_during(seconds: float) -> float:
    """Number of processors that other processes keep busy in the next `seconds`, for which this thread sleeps."""
    watch = OtherWork()
    sleep(seconds)
    return watch.processors()


def working_threads(device: torch.device) -> int:
    """Number of this process' threads that work at once on a step: one where a card does the rest."""
    return torch.get_num_threads() if device.type == "cpu" else 1


def is_crowded(others: float, threads: int, processors: int) -> bool:
    """Whether `threads` threads will wait for processors that others keep busy."""
    return others >= FEWEST and threads > free_processors(others, processors)


def is_swamped(others: float, threads: int, processors: int) -> bool:
    """Whether others have half of the processors that `threads` threads want, so that no measurement can succeed."""
    return threads >= 2 * round(processors - others)


def free_processors(others: float, processors: int) -> int:
    """Number of processors that others leave free, at least one."""
    return max(1, round(processors - others))


def others_text(others: float, processors: int) -> str:
    """A clause for a user about the processors that other processes keep busy."""
    return f"other processes keep {others:.1f} of {processors} processors busy"


def busy_note(others: float, threads: int, processors: int) -> str | None:
    """A line for a user whose threads will wait for processors that others keep busy; None where they will not."""
    if not is_crowded(others, threads, processors):
        return None
    return (
        f"{others_text(others, processors)}, which can make {threads} threads many times slower than fewer; --threads "
        f"{free_processors(others, processors)} leaves room for them"
    )


def _system_seconds() -> float:
    """Seconds that all processors together have worked since the system's start."""
    times = psutil.cpu_times()._asdict()
    # Linux counts the time of guests within that of users.
    return float(sum(times[name] for name in times.keys() - {"idle", "iowait", "guest", "guest_nice"}))


def _own_seconds() -> float:
    """Processor seconds of this process, and of its children that have ended."""
    return float(sum(psutil.Process().cpu_times()[:4]))
