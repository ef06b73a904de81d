"""Clocks that wait for the device's work."""

from __future__ import annotations

from collections.abc import Callable
from threading import RLock, get_ident, local
from time import perf_counter
from types import TracebackType
from typing import Any

import torch

STEADY = 1.5
"""Largest ratio of slowest to fastest round for which a measurement is kept. Another busy process exceeds it."""
Mark = Any
"""A point in the work of a device: an event of its module, or on a CPU a time in seconds."""


def queues_work(device: torch.device) -> bool:
    """Whether the host runs ahead of `device`, so that a read of a result makes it wait for all work queued before.

    mps does too, but its module has other signatures, so it is treated like a CPU.
    """
    return device.type not in ("cpu", "mps")


def synchronize(device: torch.device) -> None:
    """Wait for work queued on `device`; returns at once for a CPU."""
    if queues_work(device):
        torch.get_device_module(device).synchronize(device)


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
    """Laps of this thread's own work, without the time that it waits for other threads with the same model.

    A lap ends when the host has read a result, so that the work queued on `device` is done. Marks time parts of a lap
    without waiting for the device.
    """

    __slots__ = ("_device", "_last", "_lock", "_thread", "_waited")

    def __init__(self, lock: WaitedLock, device: torch.device) -> None:
        self._lock = lock
        self._device = device
        self._begin()

    def lap(self) -> float:
        """Seconds since the last lap, or since the beginning."""
        last, waited, thread = self._last, self._waited, self._thread
        self._begin()
        # A step may end a lap in another thread than the one that began it; what that one has waited is not known here.
        waiting = self._waited - waited if self._thread == thread else 0.0
        return self._last - last - waiting

    def mark(self) -> Mark:
        """The time at which the work so far is done, on a device that queues it; else the present time."""
        if not queues_work(self._device):
            return self._now()
        module = torch.get_device_module(self._device)
        event = module.Event(enable_timing=True)
        event.record(module.current_stream(self._device))  # by default it is that of another card
        return event

    @staticmethod
    def between(begin: Mark, end: Mark) -> float:
        """Seconds between two marks, whose work must be done."""
        if isinstance(begin, float):
            return end - begin
        return float(begin.elapsed_time(end)) / 1e3

    def _begin(self) -> None:
        self._last = perf_counter()
        self._waited = self._lock.waited
        self._thread = get_ident()

    def _now(self) -> float:
        return perf_counter() - self._lock.waited
