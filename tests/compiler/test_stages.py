"""The stages hand on to each other what they should."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ssd_artifacts.anchors import AnchorSet
from ssd_compiler.calibrate import Sample
from ssd_compiler.data.prompts import PromptFeatures
from ssd_compiler.search.search import SearchBounds
from ssd_compiler.search.stage import SearchStage, mixture_of
from ssd_compiler.settings import CompileSettings, SearchMethod
from ssd_compiler.stages import Stages
from tests.tables import latency_table


def features(axis: int, count: int) -> list[PromptFeatures]:
    rows = 0.2 * np.random.default_rng(axis).standard_normal((count, 16))
    rows[:, axis] += 1.0
    return [{"last": row.tolist(), "mean": row.tolist()} for row in rows]


def anchors(names: str, unknown: int, monkeypatch: pytest.MonkeyPatch) -> tuple[AnchorSet, list[Sequence[str]]]:
    """Inputs of domains a, b, … with out-of-domain prompts, and the known domains that these were asked for."""
    asked = list[Sequence[str]]()

    def out_of_domain_prompts(known: Sequence[str], loaded: Any) -> list[list[int]]:
        asked.append(known)
        return [[1]] * unknown

    def features_of(decoder: Any, prompts: list[list[int]], tick: Any) -> list[PromptFeatures]:
        assert prompts, "a model has nothing to do for none"
        return features(9, len(prompts))

    monkeypatch.setattr("ssd_compiler.stages.out_of_domain_prompts", out_of_domain_prompts)
    monkeypatch.setattr("ssd_compiler.stages.features_of", features_of)
    work = SimpleNamespace(stage=lambda name, compute: compute())
    reporter = SimpleNamespace(stage=lambda name, total: nullcontext())
    given: Any = (CompileSettings("m", tuple(names)), None, None, None, work, reporter)
    pool = {n: features(i, 30) for i, n in enumerate(names)}
    samples = {n: [Sample([1], [2], each, []) for each in features(i, 6)] for i, n in enumerate(names)}
    return Stages(*given).anchors(pool, samples), asked


def test_the_threshold_is_set_against_prompts_of_no_domain(monkeypatch: pytest.MonkeyPatch) -> None:
    with_unknown, asked = anchors("ab", 30, monkeypatch)
    assert [tuple(known) for known in asked] == [("a", "b")]
    assert with_unknown.threshold > anchors("ab", 0, monkeypatch)[0].threshold + 0.05


def test_the_mixture_has_as_many_samples_of_each_domain() -> None:
    for sizes, share in (((8, 8), 4), ((8, 2), 2), ((9, 9, 1), 1), ((2, 2, 2, 2), 1)):
        domains = [[Sample([domain], [1, 2], {}, [])] * size for domain, size in enumerate(sizes)]
        assert [sample.prompt for sample in mixture_of(domains)] == [
            [n] for n in range(len(sizes)) for _ in range(share)
        ]


def test_where_every_domain_is_known_or_one_stands_alone_no_other_prompt_is_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert anchors("abc", 0, monkeypatch)[0].domains == ("a", "b", "c")
    alone, asked = anchors("a", 30, monkeypatch)
    assert alone.domains == ("a",)
    assert asked == []


@pytest.mark.parametrize(
    ("method", "budget", "seconds", "evaluations"),
    [
        ("self-sd", None, 3600.0 / 3, 128),
        ("self-sd", 7200.0, 7200.0 / 3, 10_000),
        ("both", None, float("inf"), 128),
        ("both", 90.0, 30.0, 10_000),
    ],
)
def test_searches_share_the_budget_and_those_by_the_clock_an_hour_without_one(
    method: SearchMethod, budget: float | None, seconds: float, evaluations: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class FoundError(Exception):
        pass

    def search(decoder: Any, reference: Any, latency: Any, context: int, bounds: SearchBounds, *_: Any) -> None:
        raise FoundError(bounds)

    monkeypatch.setattr("ssd_compiler.search.stage.search", search)
    monkeypatch.setattr("ssd_compiler.search.stage.reference_states", lambda *_: None)
    work = SimpleNamespace(stage=lambda name, compute: compute())
    reporter = SimpleNamespace(stage=lambda name, total: nullcontext())
    latency = latency_table(4)
    settings = CompileSettings("m", ("a", "b"), search=method, budget_seconds=budget)
    given: Any = (settings, None, frozenset(), None, latency, work, reporter, 3)
    with pytest.raises(FoundError) as caught:
        SearchStage(*given).search("a", [Sample([1], [2], {}, [])])
    bounds = caught.value.args[0]
    assert (bounds.method, bounds.seconds, bounds.evaluations) == (method, seconds, evaluations)
