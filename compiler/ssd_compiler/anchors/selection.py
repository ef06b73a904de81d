"""Selects prompts that stand for a domain: its anchors, and those that masks are searched on."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from sklearn.cluster import KMeans
from sklearn.exceptions import ConvergenceWarning

Rows = NDArray[np.float32]
Features = Mapping[str, Rows]
"""Maps a domain to the feature vectors [prompts, d] of its prompts."""


def central(rows: Rows, k: int) -> NDArray[np.int64]:
    """The k prompts of a domain whose `rows` [prompts, d] are nearest to their mean.

    This equals KNN-SSD's joint K-means (§4.1, eq. 2) where each cluster is one domain, but does not depend on the other
    domains.
    """
    return np.argsort(np.linalg.norm(rows - rows.mean(0), axis=1), kind="stable")[:k]


def representatives(rows: Rows, k: int, seed: int) -> NDArray[np.int64]:
    """The prompts nearest to the k centres of a K-means over `rows` [prompts, d] (KNN-SSD §5.1)."""
    centres = k_means(rows, min(k, len(rows)), seed).cluster_centers_
    return np.unique([np.linalg.norm(rows - centre, axis=1).argmin() for centre in centres])


def k_means(rows: Rows, clusters: int, seed: int) -> KMeans:
    """Run K-means ten times and return the best fit."""
    with warnings.catch_warnings():
        # Having fewer distinct prompts than clusters is harmless, so the user is not warned.
        warnings.simplefilter("ignore", ConvergenceWarning)
        return KMeans(clusters, n_init=10, random_state=seed).fit(rows)
