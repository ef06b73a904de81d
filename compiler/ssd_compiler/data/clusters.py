"""Clusters unlabelled prompts by their features, so that each cluster can become a domain (KNN-SSD §5.3)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import silhouette_score

from ssd_compiler.anchors.selection import Rows, k_means
from ssd_compiler.settings import MIN_PROMPTS

MOST_CLUSTERS = 8
LEAST_SILHOUETTE = 0.1
"""Prompts form a single domain if the best partition's mean silhouette is below this."""


def clusters(features: Rows, count: int | None, seed: int) -> NDArray[np.int64]:
    """Cluster features [prompts, d] and return each prompt's cluster number; 0 is the largest cluster.

    K-means runs on centred directions, whose distance corresponds to the cosine of routing. Without `count`, the number
    of clusters up to `MOST_CLUSTERS` with the highest mean silhouette is used. Clusters too small for a domain are
    merged into the nearest large one.
    """
    centred = features - features.mean(0)
    rows = centred / np.linalg.norm(centred, axis=1, keepdims=True).clip(1e-12)
    most = max(1, len(rows) // MIN_PROMPTS)
    if count is not None:
        return _assigned(rows, min(count, most), seed)
    found = [_assigned(rows, n, seed) for n in range(2, min(MOST_CLUSTERS, most) + 1)]
    scored = [(float(silhouette_score(rows, labels)), labels) for labels in found if len(set(labels.tolist())) > 1]
    best = max(scored, key=lambda each: each[0], default=None)
    return best[1] if best is not None and best[0] >= LEAST_SILHOUETTE else np.zeros(len(rows), np.int64)


def _assigned(rows: Rows, count: int, seed: int) -> NDArray[np.int64]:
    means = k_means(rows, count, seed)
    sizes = np.bincount(means.labels_, minlength=count)
    large = [int(i) for i in np.argsort(-sizes, kind="stable") if sizes[i] >= MIN_PROMPTS] or [int(sizes.argmax())]
    distances = np.linalg.norm(rows[:, None] - means.cluster_centers_[large][None], axis=-1)
    nearest = distances.argmin(1)
    by_size = np.argsort(-np.bincount(nearest, minlength=len(large)), kind="stable")
    return np.argsort(by_size)[nearest].astype(np.int64)
