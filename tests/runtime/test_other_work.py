"""A user whose threads will wait for other processes is told, and nobody else."""

from __future__ import annotations

import os
import subprocess
import sys
from time import perf_counter

import pytest

from ssd_runtime.profiling.other_work import OtherWork, busy_note


@pytest.mark.parametrize(
    ("others", "threads", "processors", "advice"),
    [
        (1.0, 2, 2, "--threads 1 "),
        (1.9, 2, 2, "--threads 1 "),
        (6.2, 8, 16, None),
        (6.2, 16, 16, "--threads 10 "),
        (0.1, 2, 2, None),
        (1.0, 1, 2, None),
        (2.0, 1, 2, None),
    ],
)
def test_advice_leaves_processors_to_others(others: float, threads: int, processors: int, advice: str | None) -> None:
    found = busy_note(others, threads, processors)
    assert (found is None) if advice is None else (found is not None and advice in found)


def test_others_work_is_seen_and_ones_own_is_not() -> None:
    def seen(seconds: float) -> float:
        watch = OtherWork()
        while perf_counter() < watch.began + seconds:
            pass
        return watch.processors()

    quiet = min(seen(0.5) for _ in range(3))  # the machine may be busy, but not by this process
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        busy = max(seen(0.5) for _ in range(6))
    finally:
        other.kill()
        other.wait()
    assert busy > 0.25
    assert quiet < (os.cpu_count() or 1) - 0.4
