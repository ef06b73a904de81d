"""Which prompts of a domain become its anchors."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray
from sklearn.cluster import KMeans
from sklearn.exceptions import ConvergenceWarning

Rows = NDArray[np.float32]
Features = Mapping[str, Rows]
"""Domain to its prompts' feature vectors [prompts, d]."""


def central(centred: Features, k: int, seed: int) -> dict[str, NDArray[np.int64]]:
    """The k prompts of each domain nearest to its own mean.

    What KNN-SSD's joint K-means comes to where each cluster is one domain, but independent of the other domains.
    """
    distances = {name: np.linalg.norm(rows - rows.mean(0), axis=1) for name, rows in centred.items()}
    return {name: np.argsort(distance, kind="stable")[:k] for name, distance in distances.items()}


def representatives(centred: Features, k: int, seed: int) -> dict[str, NDArray[np.int64]]:
    """The prompts nearest to the k centres of K-means in each domain by itself (KNN-SSD §5.1)."""
    found = {}
    for name, rows in centred.items():
        centres = k_means(rows, min(k, len(rows)), seed).cluster_centers_
        found[name] = np.unique([np.linalg.norm(rows - centre, axis=1).argmin() for centre in centres])
    return found


def joint_nearest(centred: Features, k: int, seed: int) -> dict[str, NDArray[np.int64]]:
    """The k prompts of each domain nearest to its cluster's centre, after joint K-means (KNN-SSD §4.1, eq. 2).

    There are as many clusters as domains; a cluster belongs to the domain most of its prompts come from, and a domain
    without a cluster is represented around its own mean.
    """
    centres = _joint_centres(centred, seed)
    distances = {name: np.linalg.norm(rows - centres[name], axis=1) for name, rows in centred.items()}
    return {name: np.argsort(distance, kind="stable")[:k] for name, distance in distances.items()}


RULES: Mapping[str, Callable[[Features, int, int], dict[str, NDArray[np.int64]]]] = {
    "central": central,
    "per_domain": representatives,
    "joint": joint_nearest,
}


def _joint_centres(centred: Features, seed: int) -> dict[str, Rows]:
    names = list(centred)
    owner = np.repeat(np.arange(len(names)), [len(centred[name]) for name in names])
    means = k_means(np.concatenate([centred[name] for name in names]), len(names), seed)
    centres = {name: centred[name].mean(0) for name in names}
    held = dict.fromkeys(names, 0)
    for cluster in range(len(names)):
        counts = np.bincount(owner[means.labels_ == cluster], minlength=len(names))
        name = names[int(counts.argmax())]
        # Of two clusters of one domain, the one that holds more of it speaks for it.
        if counts.max() > held[name]:
            centres[name], held[name] = means.cluster_centers_[cluster], int(counts.max())
    return centres


def k_means(rows: Rows, clusters: int, seed: int) -> KMeans:
    """The best of ten runs."""
    with warnings.catch_warnings():
        # Fewer distinct prompts than clusters is nothing to tell the user about.
        warnings.simplefilter("ignore", ConvergenceWarning)
        return KMeans(clusters, n_init=10, random_state=seed).fit(rows)
