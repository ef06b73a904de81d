"""How sure a measured speed-up is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

RESAMPLES = 2000


def speedup(plain_seconds: Sequence[float], seconds: Sequence[float]) -> float:
    """Total plain seconds ÷ total seconds for the same tokens."""
    return float(np.sum(plain_seconds) / np.sum(seconds))


def bootstrap_interval(plain_seconds: Sequence[float], seconds: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """95% bootstrap interval of `speedup` over prompts; entry i of both belongs to prompt i."""
    plain, other = np.asarray(plain_seconds, float), np.asarray(seconds, float)
    picks = np.random.default_rng(seed).integers(0, len(plain), (RESAMPLES, len(plain)))
    low, high = np.percentile(plain[picks].sum(1) / other[picks].sum(1), [2.5, 97.5])
    return float(low), float(high)
