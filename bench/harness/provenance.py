"""Provenance of figures: the commit, and how much of the machine other guests took."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

import torch

from ssd_runtime.devices.device import device_identity

STAT = Path("/proc/stat")
WRITTEN = ("docs", "README.md", "bench/benchmarks/outcomes", "bench/papers/outcomes")


def commit() -> str | None:
    """The checked-out commit, with a + if a file differs that no measurement writes; None outside a repository.

    Measurements write outcomes, and the pages and the README that quote them.
    """
    found = _git("rev-parse", "--short", "HEAD")
    written = [f":(top,exclude){path}" for path in WRITTEN]
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ":/", *written)
    return f"{found}+" if found and changed else found or None


def processor() -> str:
    """The name of the device that measurements run on."""
    return device_identity(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


@dataclass(frozen=True, slots=True)
class Watch:
    """Measures the processor time that other guests of a virtual machine's host take from now on."""

    began: float = field(default_factory=monotonic)
    before: float | None = field(default_factory=lambda: stolen_seconds(STAT))

    def stolen(self) -> float | None:
        """Share of processor time that others took; None where the system does not count it."""
        after = stolen_seconds(STAT)
        elapsed = monotonic() - self.began
        if after is None or self.before is None or not elapsed:
            return None
        return (after - self.before) / elapsed / (os.cpu_count() or 1)


def stolen_seconds(stat: Path) -> float | None:
    """Processor seconds stolen since boot, over all processors; None if `stat` is not in Linux's format."""
    try:
        name, *ticks = stat.read_text(encoding="ascii").split("\n", 1)[0].split()
        return int(ticks[7]) / os.sysconf("SC_CLK_TCK") if name == "cpu" else None
    except (OSError, ValueError, IndexError):
        return None


def disturbance(stolen: float | None) -> str:
    """A sentence about stolen time for readers of a figure; empty if unknown."""
    return "" if stolen is None else f"Other guests of the machine took {stolen:.1%} of its processors' time."


def _git(*arguments: str) -> str:
    """Output of git without surrounding blanks; empty without git or a repository."""
    git = ["git", "-C", str(Path(__file__).parent), *arguments]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""
