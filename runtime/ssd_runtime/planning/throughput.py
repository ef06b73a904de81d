"""Expected tokens a second of drafting with a mask, from measured acceptance and measured latency."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ssd_artifacts.domain_record import DomainRecord
from ssd_profiles.acceptance import AcceptanceProfile
from ssd_profiles.latency import LatencyTable
from ssd_profiles.mask import SkipMask


@dataclass(frozen=True, slots=True)
class Entry:
    """A mask to choose from, with what its drafts yield."""

    name: str
    mask: SkipMask
    profile: AcceptanceProfile


@dataclass(frozen=True, slots=True)
class Option:
    """The best way to draft at one context length."""

    entry: Entry
    draft_length: int
    threshold: float
    tokens_per_second: float
    speedup: float
    """Against plain decoding at the same context length, by the same latency table."""


def entries_of(record: DomainRecord, num_layers: int) -> list[Entry]:
    """The frontier of a domain."""
    return [
        Entry(f"{record.name}[{index}]", entry.skip_mask(num_layers), entry.profile())
        for index, entry in enumerate(record.frontier)
    ]


def best_option(entries: Sequence[Entry], latency: LatencyTable, context: int) -> Option | None:
    """The (mask, draft length, threshold) of most tokens a second; None without entries.

    KnapSpec's TPT (eq. 4) with two differences: tokens and draft steps a cycle are those of the acceptance
    profile, and a verification costs what was measured for that many tokens, not one plain step.
    """
    plain = latency.step_seconds(context)
    grid = latency.queries
    verify_curve = [latency.step_seconds(context, n) for n in grid]
    best: Option | None = None
    for entry in entries:
        profile = entry.profile
        verify = np.interp(profile.steps + 1.0, grid, verify_curve)
        rate = profile.tokens / (profile.steps * latency.step_seconds(context, 1, entry.mask) + verify)
        row, column = np.unravel_index(int(rate.argmax()), rate.shape)
        speed = float(rate[row, column])
        if best is None or speed > best.tokens_per_second:
            length, threshold = profile.draft_lengths[row], profile.thresholds[column]
            best = Option(entry, length, threshold, speed, speed * plain)
    return best
