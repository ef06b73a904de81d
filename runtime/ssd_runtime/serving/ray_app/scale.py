"""The number of replicas and the resources of each."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace

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
    def of(
        cls,
        replicas: str,
        threads: int | None,
        *,
        device: str | None = None,
        local: bool = False,
        grace: float = 30.0,
        reload: bool = False,
    ) -> Scale:
        """Read `N`, or `MIN:MAX` for a number that follows the load. Raises UserError for anything else.

        Without `threads`, `local` replicas share this machine's cores, and others have as many as this machine each.
        Raises UserError too if this machine has not the cores for the least number of `local` ones.
        """
        match = re.fullmatch(r"([0-9]{1,4})(?::([0-9]{1,4}))?", replicas)
        least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= least <= most <= MOST:
            raise UserError(f"--replicas: expected N or MIN:MAX from 1 to {MOST}, got {replicas!r}")
        cores = os.cpu_count() or 1
        cpus = threads or (max(1, cores // most) if local else cores)
        if local and (needed := least * cpus) > cores:
            raise UserError(
                f"--replicas: {least} of {cpus} threads each need {needed} cores, and there are {cores}; use fewer, or "
                "fewer --threads"
            )
        gpus = int(device not in (None, "cpu"))
        return cls(least=least, most=most, cpus=cpus, gpus=gpus, grace=grace, reload=reload)

    def on_cards(self, cards: int) -> Scale:
        """The scale where no device is named: a card for each replica if the cluster has so many, else none.

        Ray hides the cards that a replica has not asked for.
        """
        return replace(self, gpus=int(cards >= self.most))
