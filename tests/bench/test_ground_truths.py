"""Searches on ground truths are kept, so that a killed run goes on where it was."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.papers.tools import ground_truths
from bench.papers.tools.ground_truths import Ground, Searched
from ssd_compiler.search.search import SearchBounds
from tests.tables import latency_table

TABLE = latency_table(2 * ground_truths.LAYERS)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """The searches that were made, as method, evaluations and seed."""
    made = list[tuple[str, int, int]]()

    def search(decoder: Any, reference: Any, latency: Any, context: int, bounds: SearchBounds, *_: Any) -> Any:
        made.append((bounds.method, bounds.evaluations, bounds.seed))
        return SimpleNamespace(cost=SimpleNamespace(seconds=2.0, progress=[(0.5, 1.1), (1.5, 1.2)]))

    monkeypatch.setattr(ground_truths, "search", search)
    monkeypatch.setattr(Ground, "_model", lambda self: (None, None, None))
    return made


def test_a_search_is_made_once_and_recalled_from_its_file(tmp_path: Path, made: list[tuple[str, int, int]]) -> None:
    first = Ground("pairs", 3, TABLE, tmp_path).searched("both", 24)
    assert first.best == 1.2
    again = Ground("pairs", 3, TABLE, tmp_path)
    recalled = again.searched("both", 24)
    assert (recalled.seconds, recalled.best) == (first.seconds, first.best) == (2.0, 1.2)
    assert made == [("both", 24, 3)]


def test_searches_that_differ_in_anything_do_not_meet(tmp_path: Path, made: list[tuple[str, int, int]]) -> None:
    for name in ("pairs", "diffuse"):
        for seed in (0, 1):
            for method in ground_truths.METHODS:
                for count in (24, 100):
                    Ground(name, seed, TABLE, tmp_path).searched(method, count)
    assert len(made) == 2 * 2 * len(ground_truths.METHODS) * 2


def test_means_are_over_seeds() -> None:
    some = [Searched(2.0, [(1.0, 0.8), (1.5, 1.0)]), Searched(4.0, [(1.0, 1.2)])]
    assert ground_truths.mean_of(some) == (1.1, 3.0)
