"""How many replicas there are, and what each takes."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from ssd_profiles.errors import UserError

MOST = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """The number of replicas, from `least` to `most`, and what each takes of its host."""

    least: int
    most: int
    cpus: int
    """Cores, which are the threads of the replica's engine."""
    gpus: int = 0
    grace: float = 30.0
    """Seconds that open requests have to end in when a replica stops."""
    reload: bool = False

    @classmethod
    def of(cls, replicas: str, cpus: int, device: str | None, grace: float = 30.0, reload: bool = False) -> Scale:
        """Read `N`, or `MIN:MAX` for a number that follows the load. Raises UserError for anything else."""
        least, most = read_replicas(replicas)
        on_card = device is not None and device != "cpu"
        return cls(least=least, most=most, cpus=cpus, gpus=int(on_card), grace=grace, reload=reload)


def read_replicas(text: str) -> tuple[int, int]:
    """The least and the most replicas of `--replicas`. Raises UserError for what is no number or range."""
    match = re.fullmatch(r"(\d{1,4})(?::(\d{1,4}))?", text)
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= least <= most <= MOST:
        raise UserError(f"--replicas: expected N or MIN:MAX from 1 to {MOST}, got {text!r}")
    return least, most


def default_threads(replicas: int, local: bool) -> int:
    """The cores of a replica where the user names none: this machine's, shared by those that run here."""
    cores = os.cpu_count() or 1
    return max(1, cores // replicas) if local else cores
