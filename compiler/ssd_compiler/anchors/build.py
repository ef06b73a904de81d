"""Builds the anchors of a bundle and the threshold below which a prompt is out of domain."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ssd_artifacts.anchors import AnchorSet
from ssd_compiler.anchors.selection import Features, Rows, central

ALONE_QUANTILE = 0.05
"""A bundle of one domain has no other to compare with: this quantile of its own prompts' similarities counts."""
ALONE_MARGIN = 0.2
"""The threshold of such a bundle lies this far below that quantile."""
OTHERS = 24
"""Prompts per domain that are kept beside its anchors."""


def build_anchors(
    pool: Features,
    held_back: Features,
    feature: str,
    k: int,
    base: AnchorSet | None = None,
    out_of_domain: Rows | None = None,
) -> AnchorSet:
    """Select the k most central prompts of each domain as its anchors, and set the out-of-domain threshold.

    Features are first centred on the mean of the domains' means, because a few large common dimensions would hide the
    differences.

    The threshold is set on the `held_back` prompts and on prompts of the pool that did not become anchors. Negatives
    are the features `out_of_domain` [prompts, d], and each domain in turn with its own anchors left out. With `base`,
    the new domains join its domains, whose anchors stay.
    """
    known = base.domains if base is not None else ()
    domains = (*known, *pool)
    sums = np.sum([pool[name].mean(0, dtype=np.float64) for name in pool], axis=0)
    if base is not None:
        sums = sums + len(known) * base.center.astype(np.float64)
    center = (sums / len(domains)).astype(np.float32)
    chosen = {name: central(rows - center, k) for name, rows in pool.items()}
    picked = [pool[name][chosen[name]].astype(np.float32) for name in pool]
    rest = [_some(np.concatenate([np.delete(pool[n], chosen[n], axis=0), held_back[n]])) for n in pool]
    features, labels = _labelled(picked, len(known))
    others, other_labels = _labelled(rest, len(known))
    if base is not None:
        features = np.concatenate([base.features, features])
        labels = np.concatenate([base.labels, labels])
        others = np.concatenate([base.others, others])
        other_labels = np.concatenate([base.other_labels, other_labels])
    anchors = AnchorSet(
        feature=feature,
        domains=domains,
        features=features,
        center=center,
        labels=labels,
        threshold=-1.0,
        others=others,
        other_labels=other_labels,
    )
    return replace(anchors, threshold=_threshold(anchors, out_of_domain))


def _some(rows: Rows) -> NDArray[np.float16]:
    """Pick at most `OTHERS` rows, evenly spaced."""
    kept = np.unique(np.linspace(0, len(rows) - 1, min(len(rows), OTHERS)).round().astype(int))
    return rows[kept].astype(np.float16)


def _labelled(groups: list[Any], first: int) -> tuple[Any, NDArray[np.int64]]:
    labels = np.repeat(np.arange(first, first + len(groups)), [len(rows) for rows in groups])
    return np.concatenate(groups), labels.astype(np.int64)


def similarities(anchors: AnchorSet, features: Rows) -> Rows:
    """Cosine of each feature [n, d] to the nearest anchor of each domain: [n, domains]."""
    cosines = anchors.directions(features) @ anchors.directions(anchors.features).T
    best = [cosines[:, anchors.labels == label].max(1) for label in range(len(anchors.domains))]
    return np.stack(best, axis=1)


def _threshold(anchors: AnchorSet, out_of_domain: Rows | None) -> float:
    """The similarity threshold with the highest sensitivity + specificity for known prompts (Youden's J)."""
    found = similarities(anchors, anchors.others.astype(np.float32))
    known = found.max(1)
    if len(anchors.domains) == 1:
        return float(np.quantile(known, ALONE_QUANTILE)) - ALONE_MARGIN
    found[np.arange(len(found)), anchors.other_labels] = -1.0
    unknown = found.max(1)
    if out_of_domain is not None:
        told = similarities(anchors, out_of_domain).max(1)
        # With only two domains, each lies opposite to the other after centring, which real out-of-domain prompts do
        # not.
        unknown = told if len(anchors.domains) == 2 else np.concatenate([told, unknown])
    steps = np.unique(np.concatenate([known, unknown]))
    between = (steps[1:] + steps[:-1]) / 2 if len(steps) > 1 else steps
    scores = [(known >= step).mean() + (unknown < step).mean() for step in between]
    return float(between[int(np.argmax(scores))])
