"""The number of threads that torch uses on a processor."""

from __future__ import annotations

import os
from pathlib import Path

import torch

CGROUP = Path("/sys/fs/cgroup")
"""Folder of the limits that Linux sets a container, in one of two versions."""
QUOTAS = (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"))
"""Files of each version, with the processors' time per period and the period, in microseconds."""


def use_threads(threads: int | None) -> None:
    """Let torch use `threads` threads; None for its default, but no more than the processors that a container may use.

    The system stops further threads in the middle of their work until the next period, and all others wait for them.
    """
    if threads is None:
        threads = min(torch.get_num_threads(), max(1, int(allowed_processors())))
    torch.set_num_threads(threads)


def allowed_processors() -> float:
    """Seconds of processors' time that this container has per second; those of all processors without a limit."""
    for names in QUOTAS:
        try:
            quota, period = " ".join((CGROUP / name).read_text() for name in names).split()
            if float(quota) > 0:
                return float(quota) / float(period)
        except (OSError, ValueError, ZeroDivisionError):  # no such version, or `max`
            continue
    return float(os.cpu_count() or 1)
