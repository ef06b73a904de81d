"""Rules that select which prompts of a domain become its anchors."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray
from sklearn.cluster import KMeans
from sklearn.exceptions import ConvergenceWarning

Rows = NDArray[np.float32]
Features = Mapping[str, Rows]
"""Maps a domain to the feature vectors [prompts, d] of its prompts."""


def central(centred: Features, k: int, seed: int) -> dict[str, NDArray[np.int64]]:
    """Select the k prompts of each domain nearest to its own mean.

    This equals KNN-SSD's joint K-means where each cluster is one domain, but does not depend on the other domains.
    """
    distances = {name: np.linalg.norm(rows - rows.mean(0), axis=1) for name, rows in centred.items()}
    return {name: np.argsort(distance, kind="stable")[:k] for name, distance in distances.items()}


def representatives(centred: Features, k: int, seed: int) -> dict[str, NDArray[np.int64]]:
    """Select the prompts nearest to the k centres of a K-means within each domain (KNN-SSD §5.1)."""
    found = {}
    for name, rows in centred.items():
        centres = k_means(rows, min(k, len(rows)), seed).cluster_centers_
        found[name] = np.unique([np.linalg.norm(rows - centre, axis=1).argmin() for centre in centres])
    return found


def joint_nearest(centred: Features, k: int, seed: int) -> dict[str, NDArray[np.int64]]:
    """Select the k prompts of each domain nearest to its cluster's centre, after joint K-means (KNN-SSD §4.1, eq. 2).

    There are as many clusters as domains. A cluster belongs to the domain that most of its prompts come from; a domain
    without a cluster uses its own mean.
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
        # When two clusters belong to one domain, the cluster with more of its prompts represents it.
        if counts.max() > held[name]:
            centres[name] = means.cluster_centers_[cluster]
            held[name] = int(counts.max())
    return centres


def k_means(rows: Rows, clusters: int, seed: int) -> KMeans:
    """Run K-means ten times and return the best fit."""
    with warnings.catch_warnings():
        # Having fewer distinct prompts than clusters is harmless, so the user is not warned.
        warnings.simplefilter("ignore", ConvergenceWarning)
        return KMeans(clusters, n_init=10, random_state=seed).fit(rows)
