"""Representative features of each domain and the threshold below which a prompt belongs to none."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from sklearn.cluster import KMeans
from sklearn.exceptions import ConvergenceWarning

from ssd_artifacts.anchors import AnchorSet

Features = Mapping[str, NDArray[np.float32]]
"""Domain to its prompts' feature vectors [prompts, d]."""

KNOWN_QUANTILE = 0.05
STRANGE_QUANTILE = 0.95
ALONE_MARGIN = 0.2
"""How far below its own prompts' similarity a single domain's threshold lies: there is no other to compare with."""


def build_anchors(pool: Features, held_back: Features, feature: str, k: int, seed: int) -> AnchorSet:
    """The k prompts of each domain nearest to its cluster's centre, after joint K-means (KNN-SSD eq. 2).

    There are as many clusters as domains; a cluster belongs to the domain most of its prompts come from, and a domain
    without a cluster is represented around its own mean. Features are centred first, on the mean of the domains'
    means: a few large common dimensions would hide the differences. `held_back` prompts, used for nothing else here,
    set the out-of-domain threshold.
    """
    domains = tuple(pool)
    center = np.mean([pool[name].mean(0) for name in domains], axis=0).astype(np.float32)
    centred = {name: pool[name] - center for name in domains}
    chosen = []
    for name, centre in _centres(centred, seed).items():
        order = np.argsort(np.linalg.norm(centred[name] - centre, axis=1), kind="stable")
        chosen.append(pool[name][order[:k]])
    labels = np.repeat(np.arange(len(domains)), [len(rows) for rows in chosen]).astype(np.int64)
    anchors = AnchorSet(feature, domains, np.concatenate(chosen).astype(np.float32), center, labels, -1.0)
    return AnchorSet(feature, domains, anchors.features, center, labels, _threshold(anchors, held_back))


def _centres(centred: Features, seed: int) -> dict[str, NDArray[np.float32]]:
    names = list(centred)
    samples = np.concatenate([centred[name] for name in names])
    owner = np.repeat(np.arange(len(names)), [len(centred[name]) for name in names])
    with warnings.catch_warnings():
        # Fewer distinct prompts than domains is nothing to tell the user about.
        warnings.simplefilter("ignore", ConvergenceWarning)
        means = KMeans(len(names), n_init=10, random_state=seed).fit(samples)
    centres = {name: centred[name].mean(0) for name in names}
    held = dict.fromkeys(names, 0)
    for cluster in range(len(names)):
        counts = np.bincount(owner[means.labels_ == cluster], minlength=len(names))
        name = names[int(counts.argmax())]
        # Of two clusters of one domain, the one that holds more of it speaks for it.
        if counts.max() > held[name]:
            centres[name], held[name] = means.cluster_centers_[cluster], int(counts.max())
    return centres


def similarities(anchors: AnchorSet, features: NDArray[np.float32]) -> NDArray[np.float32]:
    """Cosine of each feature [n, d] to its nearest anchor of each domain: [n, domains]."""
    rows, columns = _directions(features - anchors.center), _directions(anchors.features - anchors.center)
    cosines = rows @ columns.T
    best = [cosines[:, anchors.labels == label].max(1) for label in range(len(anchors.domains))]
    return np.stack(best, axis=1)


def _threshold(anchors: AnchorSet, held_back: Features) -> float:
    """Half-way between how close held-back prompts come to their own domain and how close to the others."""
    own, other = [], []
    for label, name in enumerate(anchors.domains):
        found = similarities(anchors, held_back[name])
        own.append(found[:, label])
        other.append(np.delete(found, label, axis=1).ravel())
    known = float(np.quantile(np.concatenate(own), KNOWN_QUANTILE))
    strangers = np.concatenate(other)
    if not strangers.size:
        return known - ALONE_MARGIN
    return (known + min(known, float(np.quantile(strangers, STRANGE_QUANTILE)))) / 2


def _directions(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    return rows / np.linalg.norm(rows, axis=1, keepdims=True).clip(1e-12)
