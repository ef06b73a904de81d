"""A small Gaussian process over masks, which chooses the mask to try next by the scores of others."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from ssd_profiles.mask import SubLayerPlan

LENGTH_SCALE = 0.15
"""Length scale of the kernel, as a share of the sub-layers."""
NOISE = 1e-3
"""Variance of the observations' noise."""
MOST = 256
"""Most observations that are used, the latest ones: the time grows with their cube."""


def most_promising(tried: NDArray[np.int64], scores: Sequence[float], candidates: NDArray[np.int64]) -> int:
    """Index of the candidate with the highest expected improvement over the best of `scores`.

    `tried` and `candidates` are masks [n, sub-layers] as `coded`. The kernel is exp(-h² / 2l²), where h is the share of
    sub-layers in which two masks differ.
    """
    tried = tried[-MOST:]
    values = np.asarray(scores[-MOST:], float)
    spread = max(float(values.std()), 1e-6)
    known = (values - values.mean()) / spread
    among = _kernel(tried, tried) + NOISE * np.eye(len(tried))
    across = _kernel(candidates, tried)
    solved = np.linalg.solve(among, np.column_stack([known, across.T]))
    expected = across @ solved[:, 0]
    deviation = np.sqrt(np.clip(1.0 - (across * solved[:, 1:].T).sum(1), 1e-12, None))
    gain = (expected - known.max()) / deviation
    return int(np.argmax(deviation * (gain * ndtr(gain) + np.exp(-(gain**2) / 2) / math.sqrt(2 * math.pi))))


def coded(masks: Sequence[SubLayerPlan]) -> NDArray[np.int64]:
    """Numbers [masks, sub-layers] for how each sub-layer drafts: -1 if it is skipped, else its bits."""
    return np.asarray(
        [[-1 if skipped else mask.bits_of(i) for i, skipped in enumerate(mask.skipped)] for mask in masks], np.int64
    )


def _kernel(a: NDArray[np.int64], b: NDArray[np.int64]) -> NDArray[np.float64]:
    differing = (a[:, None, :] != b[None, :, :]).mean(-1)
    return np.exp(-(differing**2) / (2 * LENGTH_SCALE**2))
