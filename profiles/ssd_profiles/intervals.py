"""How sure a measured speed-up is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.special import stdtrit

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


def interval_of_few(plain_seconds: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """95% interval of `speedup` over two prompts or more, by Student's t.

    The bootstrap of two or three prompts ends at the worst of them, which is far too narrow. A ratio of totals R has
    about the standard error of the mean of p - R s, ÷ the mean of s; taken in logarithms, so that it stays above 0.
    """
    plain, other = np.asarray(plain_seconds, float), np.asarray(seconds, float)
    count, ratio = len(plain), speedup(plain_seconds, seconds)
    error = float(np.std(plain - ratio * other, ddof=1) / np.sqrt(count) / np.mean(plain))
    width = float(stdtrit(count - 1, 0.975)) * error
    return ratio * float(np.exp(-width)), ratio * float(np.exp(width))
