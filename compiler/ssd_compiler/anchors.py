"""Representative features of each domain and the threshold below which a prompt belongs to none."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.cluster import KMeans
from sklearn.exceptions import ConvergenceWarning

from ssd_artifacts.anchors import AnchorSet

Rows = NDArray[np.float32]
Features = Mapping[str, Rows]
"""Domain to its prompts' feature vectors [prompts, d]."""

ALONE_QUANTILE, ALONE_MARGIN = 0.05, 0.2
"""A single domain's threshold lies so far below its own prompts' similarity: there is no other to compare with."""
OTHERS = 24
"""Prompts a domain that are kept beside its anchors."""


def build_anchors(
    pool: Features,
    held_back: Features,
    feature: str,
    k: int,
    seed: int,
    rule: str = "central",
    base: AnchorSet | None = None,
    strangers: Rows | None = None,
) -> AnchorSet:
    """k of each domain's `pool` as its anchors by a rule of `RULES`, and the out-of-domain threshold.

    Features are centred first, on the mean of the domains' means: a few large common dimensions would hide the
    differences. The threshold is set on `held_back` prompts and on those of the pool that did not become anchors,
    against `strangers` [prompts, d] of no domain, and with each domain in turn as the strange one. With `base`, the new
    domains join its domains, whose anchors stay.
    """
    known = base.domains if base is not None else ()
    domains = (*known, *pool)
    sums = np.sum([pool[name].mean(0, dtype=np.float64) for name in pool], axis=0)
    if base is not None:
        sums = sums + len(known) * base.center.astype(np.float64)
    center = (sums / len(domains)).astype(np.float32)
    chosen = RULES[rule]({name: rows - center for name, rows in pool.items()}, k, seed)
    picked = [pool[name][chosen[name]].astype(np.float32) for name in pool]
    rest = [_some(np.concatenate([np.delete(pool[n], chosen[n], axis=0), held_back[n]])) for n in pool]
    features, labels = _labelled(picked, len(known))
    others, other_labels = _labelled(rest, len(known))
    if base is not None:
        features, labels = np.concatenate([base.features, features]), np.concatenate([base.labels, labels])
        others = np.concatenate([base.others, others])
        other_labels = np.concatenate([base.other_labels, other_labels])
    anchors = AnchorSet(feature, domains, features, center, labels, -1.0, others, other_labels)
    return replace(anchors, threshold=_threshold(anchors, strangers))


def _some(rows: Rows) -> NDArray[np.float16]:
    """At most `OTHERS` of the rows, spread over all of them."""
    kept = np.unique(np.linspace(0, len(rows) - 1, min(len(rows), OTHERS)).round().astype(int))
    return rows[kept].astype(np.float16)


def _labelled(groups: list[Any], first: int) -> tuple[Any, NDArray[np.int64]]:
    labels = np.repeat(np.arange(first, first + len(groups)), [len(rows) for rows in groups])
    return np.concatenate(groups), labels.astype(np.int64)


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


def similarities(anchors: AnchorSet, features: Rows) -> Rows:
    """Cosine of each feature [n, d] to its nearest anchor of each domain: [n, domains]."""
    rows, columns = _directions(features - anchors.center), _directions(anchors.features - anchors.center)
    cosines = rows @ columns.T
    best = [cosines[:, anchors.labels == label].max(1) for label in range(len(anchors.domains))]
    return np.stack(best, axis=1)


def _threshold(anchors: AnchorSet, strangers: Rows | None) -> float:
    """The similarity that tells best whether a prompt's domain has anchors: sensitivity + specificity at their most."""
    found = similarities(anchors, anchors.others.astype(np.float32))
    known = found.max(1)
    if len(anchors.domains) == 1:
        return float(np.quantile(known, ALONE_QUANTILE)) - ALONE_MARGIN
    found[np.arange(len(found)), anchors.other_labels] = -1.0
    strange = found.max(1)
    if strangers is not None:
        told = similarities(anchors, strangers).max(1)
        # Of two domains either lies opposite to the other, as no real stranger does.
        strange = told if len(anchors.domains) == 2 else np.concatenate([told, strange])
    steps = np.unique(np.concatenate([known, strange]))
    between = (steps[1:] + steps[:-1]) / 2 if len(steps) > 1 else steps
    scores = [(known >= step).mean() + (strange < step).mean() for step in between]
    return float(between[int(np.argmax(scores))])


def _directions(rows: Rows) -> Rows:
    return rows / np.linalg.norm(rows, axis=1, keepdims=True).clip(1e-12)
