from __future__ import annotations

import numpy as np
import pytest
import torch

from ssd_compiler.anchors.build import build_anchors
from ssd_compiler.anchors.selection import RULES
from ssd_compiler.settings import ANCHOR_RULES
from ssd_runtime.planning.routing import PromptRouter


def cloud(axis: int, count: int, seed: int, spread: float = 0.2) -> np.ndarray:
    """Points around a unit vector, with a large dimension that all domains share."""
    random = np.random.default_rng(seed)
    points = spread * random.standard_normal((count, 16))
    points[:, axis] += 1.0
    points[:, 15] += 30.0
    return points.astype(np.float32)


POOL = {name: cloud(axis, 40, axis) for axis, name in enumerate("abc")}
HELD = {name: cloud(axis, 20, 10 + axis) for axis, name in enumerate("abc")}


def test_unseen_prompts_reach_their_domain_and_others_none() -> None:
    router = PromptRouter(build_anchors(POOL, HELD, "mean", 5, 0))
    for axis, name in enumerate("abc"):
        routes = [router.nearest(torch.from_numpy(row)) for row in cloud(axis, 50, 20 + axis)]
        assert np.mean([route.domain == name for route in routes]) >= 0.98
        assert np.mean([route.known for route in routes]) >= 0.9
    unknown = [router.nearest(torch.from_numpy(row)) for row in cloud(7, 50, 30)]
    assert np.mean([route.known for route in unknown]) <= 0.2


def test_two_domains_tell_others_by_prompts_of_no_domain() -> None:
    """Centred on their middle, two domains lie opposite to each other, and any prompt is somewhat like one of them."""
    pool, held = ({name: rows[name] for name in "ab"} for rows in (POOL, HELD))
    others = np.concatenate([cloud(axis, 10, 40 + axis) for axis in (5, 6)])
    router = PromptRouter(build_anchors(pool, held, "mean", 5, 0, out_of_domain=others))
    for axis, known in ((0, True), (1, True), (7, False), (8, False)):
        routes = [router.nearest(torch.from_numpy(row)).known for row in cloud(axis, 50, 20 + axis)]
        assert np.mean([route == known for route in routes]) >= 0.85


def test_representatives_cover_a_domain_that_falls_apart() -> None:
    """As the same prompts with and without worked examples do."""
    pool = {"two": np.concatenate([cloud(0, 30, 1), cloud(1, 10, 2)]), "one": cloud(2, 40, 3)}
    anchors = build_anchors(pool, pool, "mean", 6, 0, "per_domain")
    mine = anchors.features[anchors.labels == 0]
    assert (mine[:, 0] > 0.5).any()
    assert (mine[:, 1] > 0.5).any()
    assert all(any(np.array_equal(row, one) for one in pool["two"]) for row in mine)


def test_a_domain_that_joins_gives_what_compiling_all_gives() -> None:
    whole = build_anchors(POOL, HELD, "mean", 5, 0)
    first = {name: POOL[name] for name in "ab"}
    base = build_anchors(first, HELD, "mean", 5, 0)
    joined = build_anchors({"c": POOL["c"]}, HELD, "mean", 5, 0, base=base)
    assert joined.domains == whole.domains
    assert np.array_equal(joined.features, whole.features)
    assert np.array_equal(joined.labels, whole.labels)
    assert np.array_equal(joined.others, whole.others)
    np.testing.assert_allclose(joined.center, whole.center, rtol=1e-5, atol=1e-5)
    assert joined.threshold == pytest.approx(whole.threshold, abs=1e-3)


def test_every_rule_has_a_name_for_the_command() -> None:
    assert tuple(sorted(RULES)) == ANCHOR_RULES


def test_anchors_nearest_their_joint_centre() -> None:
    anchors = build_anchors(POOL, HELD, "last", 5, 0, "joint")
    assert anchors.features.shape == (15, 16)
    assert anchors.labels.tolist() == [0] * 5 + [1] * 5 + [2] * 5
    for label, name in enumerate("abc"):
        chosen = anchors.features[anchors.labels == label]
        assert all(any(np.array_equal(row, one) for one in POOL[name]) for row in chosen)
        distance = np.linalg.norm(POOL[name] - POOL[name].mean(0), axis=1)
        picked = np.linalg.norm(chosen - POOL[name].mean(0), axis=1)
        assert picked.max() <= np.sort(distance)[9]


def test_a_domain_without_a_cluster_keeps_its_own_mean() -> None:
    """Two domains in one place, one far off in two clusters: K-means gives the pair one cluster."""
    far = np.concatenate([cloud(0, 20, 1, 0.01), 40 * cloud(1, 20, 2, 0.01)])
    pool = {"far": far, "x": cloud(4, 20, 3, 0.01), "y": cloud(4, 12, 4, 0.01)}
    anchors = build_anchors(pool, pool, "mean", 3, 0, "joint")
    assert anchors.labels.tolist() == [0] * 3 + [1] * 3 + [2] * 3


def test_one_domain_alone() -> None:
    anchors = build_anchors({"a": POOL["a"]}, {"a": HELD["a"]}, "mean", 50, 0)
    assert len(anchors.features) == 40
    assert anchors.threshold < 1.0
