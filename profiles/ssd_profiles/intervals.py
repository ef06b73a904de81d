"""Speed-ups over prompts with their confidence intervals."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.special import stdtrit


def speedup(plain_seconds: Sequence[float], seconds: Sequence[float]) -> float:
    """Total plain seconds ÷ total seconds, for the same tokens."""
    return float(np.sum(plain_seconds) / np.sum(seconds))


def speedup_interval(plain_seconds: Sequence[float], seconds: Sequence[float]) -> tuple[float, float] | None:
    """95% interval of `speedup` by Student's t, where entry i of both belongs to prompt i.

    Returns None for fewer than two prompts. The standard error of a ratio of totals R is about that of the mean of p -
    R s, ÷ the mean of p. It is taken in logarithms, so that the interval stays above 0. A bootstrap agrees at thirty
    prompts, but at two or three it ends at the worst of them, which is far too narrow.
    """
    plain = np.asarray(plain_seconds, float)
    other = np.asarray(seconds, float)
    count = len(plain)
    if count < 2:
        return None
    ratio = speedup(plain_seconds, seconds)
    error = float(np.std(plain - ratio * other, ddof=1) / np.sqrt(count) / np.mean(plain))
    width = float(stdtrit(count - 1, 0.975)) * error
    return ratio * float(np.exp(-width)), ratio * float(np.exp(width))
