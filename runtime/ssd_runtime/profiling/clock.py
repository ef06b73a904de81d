"""Clocks that wait for the device's work."""

from __future__ import annotations

from collections.abc import Callable
from threading import RLock, local
from time import perf_counter
from types import TracebackType

import torch


def synchronize(device: torch.device) -> None:
    """Wait for work queued on `device`; returns at once for a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Seconds that `work` takes, the device's part included."""
    synchronize(device)
    began = perf_counter()
    work()
    synchronize(device)
    return perf_counter() - began


class WaitedLock:
    """A re-entrant lock that sums the seconds that each thread has waited for it."""

    def __init__(self) -> None:
        self.inner = RLock()
        """The lock itself, for threads that hold it already and for work that is not timed."""
        self._waits = local()

    @property
    def waited(self) -> float:
        """Seconds that this thread has waited so far."""
        return float(getattr(self._waits, "seconds", 0.0))

    def __enter__(self) -> None:
        if self.inner.acquire(blocking=False):
            return
        began = perf_counter()
        self.inner.acquire()
        self._waits.seconds = self.waited + perf_counter() - began

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.inner.release()


class Stopwatch:
    """Laps of this thread's own work, without the time that it waits for other threads with the same model."""

    __slots__ = ("_last", "_lock")

    def __init__(self, lock: WaitedLock) -> None:
        self._lock = lock
        self._last = perf_counter() - lock.waited

    def lap(self) -> float:
        """Seconds since the last lap, or since the beginning."""
        now = perf_counter() - self._lock.waited
        seconds = now - self._last
        self._last = now
        return seconds
