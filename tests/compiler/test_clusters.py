"""Domains found without labels."""

from __future__ import annotations

import numpy as np
import pytest

from ssd_compiler.data.clusters import clusters


def groups(sizes: list[int], spread: float = 0.3, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    centres = 3.0 * np.eye(len(sizes), 24) + 5.0
    labels = np.repeat(np.arange(len(sizes)), sizes)
    return (centres[labels] + spread * random.normal(size=(len(labels), 24))).astype(np.float32), labels


@pytest.mark.parametrize("sizes", [[30, 20], [12, 30, 9], [20, 18, 16, 14]])
@pytest.mark.parametrize("given", [True, False])
def test_separate_groups_are_found_and_counted(sizes: list[int], given: bool) -> None:
    features, labels = groups(sizes)
    found = clusters(features, len(sizes) if given else None, seed=0)
    assert np.bincount(found).tolist() == sorted(sizes, reverse=True)
    for label in set(labels.tolist()):
        assert len(set(found[labels == label].tolist())) == 1


def test_one_group_stays_one_domain() -> None:
    features, _ = groups([40], spread=1.0)
    assert set(clusters(features, None, seed=0).tolist()) == {0}


def test_strays_fall_to_a_large_cluster() -> None:
    features, _ = groups([20, 20, 2])
    found = np.bincount(clusters(features, 3, seed=0))
    assert len(found) == 2
    assert found.sum() == 42
    assert found[0] >= found[1]


def test_the_largest_is_the_first_behind_strays_too() -> None:
    """Ten of one kind, nine of another with five strays beside them."""
    features, labels = groups([10, 9, 5], spread=0.1)
    features[labels == 2] = features[labels == 1][0] + 0.5 * (features[labels == 2] - features[labels == 1][0])
    assert np.bincount(clusters(features, 3, seed=0)).tolist() == [14, 10]
