"""Calibration, domains found without labels, and anchors."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch

from ssd_compiler.anchors.build import build_anchors
from ssd_compiler.anchors.selection import representatives
from ssd_compiler.calibrate import Sample, continue_prompts, middle_context, samples_of
from ssd_compiler.data.cluster_stage import clusters
from ssd_profiles.errors import UserError
from ssd_runtime.drafting.successors import RANKS
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.planning.routing import PromptRouter
from ssd_runtime.sampling.params import SamplingParams
from tests.models import tiny_model


def test_the_best_follower_of_a_greedy_continuation_is_what_follows() -> None:
    decoder = Decoder(tiny_model("llama", seed=3))
    for sample in samples_of(continue_prompts(decoder, [[1, 2, 3], [9, 4]], 21, frozenset(), lambda: None), "test"):
        whole = [sample.prompt[-1], *sample.continuation]
        followed = {(a, b): c for a, b, c in zip(whole, whole[1:], whole[2:], strict=False)}
        assert {(before, token): best for before, token, best, *_ in sample.successors} == followed
        assert all(len(set(row[2:])) == RANKS for row in sample.successors)


def test_continuations_are_what_the_runtime_would_answer() -> None:
    """With the model's own repetition penalty, behind a beginning that all prompts share."""
    model = tiny_model("llama", seed=3)
    model.generation_config.repetition_penalty = 1.4
    decoder, prompts = Decoder(model), [[1, 2, 3, 4], [1, 2, 9]]
    sampling = SamplingParams(repetition_penalty=1.4)
    found = continue_prompts(decoder, prompts, 21, frozenset(), lambda: None, sampling)
    for sample, ids in zip(samples_of(found, "test"), prompts, strict=True):
        whole = model.generate(torch.tensor([ids]), max_new_tokens=21, do_sample=False, eos_token_id=None)[0].tolist()
        assert ids + sample.continuation == whole
    assert found != continue_prompts(decoder, prompts, 21, frozenset(), lambda: None)


def test_all_prompts_are_continued_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, prompts = Decoder(tiny_model("llama", seed=3)), [[1, 2, 3, 4], [1, 2, 9], [5], [7, 7]]
    alone = [continue_prompts(decoder, [ids], 21, frozenset(), lambda: None)[0] for ids in prompts]
    rows, ticks, run = list[int](), list[int](), Decoder.run

    def watched(self: Decoder, x: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
        rows.append(len(x))
        return run(self, x, *given, **named)

    monkeypatch.setattr(Decoder, "run", watched)
    found = continue_prompts(decoder, prompts, 21, frozenset(), lambda: ticks.append(1))
    assert rows[-20:] == [len(prompts)] * 20
    assert len(ticks) == len(prompts)
    for one, other in zip(found, alone, strict=True):
        assert one["continuation"] == other["continuation"]
        assert one["successors"] == other["successors"]


def test_a_domains_choices_are_made_for_the_middle_of_its_continuations() -> None:
    samples = [Sample([1] * prompt, [1] * new, {}, []) for prompt, new in ((10, 8), (20, 4), (30, 40))]
    assert middle_context(samples) == round((14 + 22 + 50) / 3)


def test_an_answer_of_one_token_is_no_sample() -> None:
    one, two = (asdict(Sample([1], [2] * count, {}, [])) for count in (1, 2))
    assert [sample.continuation for sample in samples_of([one, two], "test")] == [[2, 2]]
    with pytest.raises(UserError, match="domain test: the model answers every prompt with its end token"):
        samples_of([one, one], "test")


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


def test_the_largest_is_the_first_behind_strays_too() -> None:
    """Ten of one kind, nine of another with five strays beside them."""
    features, labels = groups([10, 9, 5], spread=0.1)
    features[labels == 2] = features[labels == 1][0] + 0.5 * (features[labels == 2] - features[labels == 1][0])
    assert np.bincount(clusters(features, 3, seed=0)).tolist() == [14, 10]


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
    router = PromptRouter(build_anchors(POOL, HELD, "mean", 5))
    for axis, name in enumerate("abc"):
        routes = [router.nearest(torch.from_numpy(row)) for row in cloud(axis, 50, 20 + axis)]
        assert np.mean([route.domain == name for route in routes]) >= 0.98
        assert np.mean([route.known for route in routes]) >= 0.9
    unknown = [router.nearest(torch.from_numpy(row)) for row in cloud(7, 50, 30)]
    assert np.mean([route.known for route in unknown]) <= 0.2


def test_what_all_features_have_in_common_changes_no_route() -> None:
    common = np.linspace(-20, 20, 16, dtype=np.float32)
    one, other = (
        PromptRouter(build_anchors(*({n: rows + by for n, rows in each.items()} for each in (POOL, HELD)), "mean", 5))
        for by in (0.0, common)
    )
    for row in np.concatenate([cloud(axis, 9, 20 + axis) for axis in (0, 1, 7)]):
        routes = one.nearest(torch.from_numpy(row)), other.nearest(torch.from_numpy(row + common))
        assert routes[0].domain == routes[1].domain
        assert routes[0].similarity == pytest.approx(routes[1].similarity, abs=1e-3)


def test_two_domains_tell_others_by_prompts_of_no_domain() -> None:
    """Centred on their middle, two domains lie opposite to each other, and any prompt is somewhat like one of them."""
    pool, held = ({name: rows[name] for name in "ab"} for rows in (POOL, HELD))
    others = np.concatenate([cloud(axis, 10, 40 + axis) for axis in (5, 6)])
    router = PromptRouter(build_anchors(pool, held, "mean", 5, out_of_domain=others))
    for axis, known in ((0, True), (1, True), (7, False), (8, False)):
        routes = [router.nearest(torch.from_numpy(row)).known for row in cloud(axis, 50, 20 + axis)]
        assert np.mean([route == known for route in routes]) >= 0.85


def test_representatives_cover_a_domain_that_falls_apart() -> None:
    """As the same prompts with and without worked examples do."""
    rows = np.concatenate([cloud(0, 30, 1), cloud(1, 10, 2)])
    chosen = rows[representatives(rows, 6, 0)]
    assert (chosen[:, 0] > 0.5).any()
    assert (chosen[:, 1] > 0.5).any()


def test_anchors_are_the_prompts_nearest_to_their_domains_mean() -> None:
    anchors = build_anchors(POOL, HELD, "last", 5)
    assert anchors.labels.tolist() == [0] * 5 + [1] * 5 + [2] * 5
    for label, name in enumerate("abc"):
        distance = np.linalg.norm(POOL[name] - POOL[name].mean(0), axis=1)
        nearest = POOL[name][np.argsort(distance)[:5]]
        assert np.array_equal(np.sort(anchors.features[anchors.labels == label], 0), np.sort(nearest, 0))


def test_a_domain_that_joins_gives_what_compiling_all_gives() -> None:
    whole = build_anchors(POOL, HELD, "mean", 5)
    first = {name: POOL[name] for name in "ab"}
    base = build_anchors(first, HELD, "mean", 5)
    joined = build_anchors({"c": POOL["c"]}, HELD, "mean", 5, base=base)
    assert joined.domains == whole.domains
    assert np.array_equal(joined.features, whole.features)
    assert np.array_equal(joined.labels, whole.labels)
    assert np.array_equal(joined.others, whole.others)
    np.testing.assert_allclose(joined.center, whole.center, rtol=1e-5, atol=1e-5)
    assert joined.threshold == pytest.approx(whole.threshold, abs=1e-3)


def test_one_domain_alone() -> None:
    anchors = build_anchors({"a": POOL["a"]}, {"a": HELD["a"]}, "mean", 50)
    assert len(anchors.features) == 40
    assert anchors.threshold < 1.0
