"""Stages of a compile: what they hand on, and what is kept of them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from threading import Event
from time import sleep
from types import SimpleNamespace
from typing import Any

import pytest

from ssd_artifacts.files import new_folder, write_lock
from ssd_compiler.calibrate import Sample
from ssd_compiler.search.search import SearchBounds, SearchResult
from ssd_compiler.search.stage import SearchStage, measured_on, mixture_of
from ssd_compiler.settings import CompileSettings, SearchMethod
from ssd_compiler.workspace import Workspace
from ssd_profiles.errors import UserError
from tests.bundles import fingerprint, record
from tests.tables import latency_table, with_curve, with_light_costs

SETTINGS = CompileSettings("m", ("cnn",))


def begun(folder: Path, settings: CompileSettings, model: str, resume: bool) -> Workspace:
    work = Workspace(folder / "out", settings, resume)
    work.begin(fingerprint(config_sha256=sha256(model.encode()).hexdigest()))
    return work


def test_finished_stages_are_not_redone(tmp_path: Path) -> None:
    work = begun(tmp_path, SETTINGS, "model", resume=False)
    assert work.stage("one", lambda: {"a": [1, 2.5]}) == {"a": [1, 2.5]}
    again = begun(tmp_path, SETTINGS, "model", resume=True)
    assert again.stage("one", lambda: pytest.fail("redone")) == {"a": [1, 2.5]}
    assert again.kept == 1
    afresh = begun(tmp_path, SETTINGS, "model", resume=False)
    assert afresh.kept == 0
    assert afresh.stage("one", lambda: "new") == "new"


def test_whether_a_compile_goes_on_is_known(tmp_path: Path) -> None:
    for resume, goes_on in ((True, False), (True, True), (False, False)):
        assert Workspace(tmp_path / "out", SETTINGS, resume).begin(fingerprint()) is goes_on


def test_half_a_result_is_none(tmp_path: Path) -> None:
    """A power cut may leave it."""
    work = begun(tmp_path, SETTINGS, "model", resume=False)
    work.stage("one", lambda: {"a": [1, 2.5]})
    path = work.folder / "one.json"
    path.write_bytes(path.read_bytes()[:-3])
    assert begun(tmp_path, SETTINGS, "model", resume=True).stage("one", lambda: 4) == 4


def test_a_failed_stage_is_not_finished(tmp_path: Path) -> None:
    work = begun(tmp_path, SETTINGS, "model", resume=False)
    with pytest.raises(ZeroDivisionError):
        work.stage("one", lambda: 1 // 0)
    assert work.stage("one", lambda: 3) == 3


@pytest.mark.parametrize("changed", ["model", "seed"])
def test_other_settings_are_not_resumed(tmp_path: Path, changed: str) -> None:
    begun(tmp_path, SETTINGS, "model", resume=False)
    other = CompileSettings("m", ("cnn",), seed=int(changed == "seed"))
    with pytest.raises(UserError, match="--resume"):
        begun(tmp_path, other, "another" if changed == "model" else "model", resume=True)


def test_one_compile_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever caches they use."""
    with Workspace(tmp_path / "out", SETTINGS, resume=False) as work:
        work.begin(fingerprint())
        monkeypatch.setenv("SSD_CACHE", str(tmp_path.parent / "cache"))
        with (
            pytest.raises(UserError, match=r"out: another compile is writing"),
            Workspace(tmp_path / "out", SETTINGS, resume=True),
        ):
            pytest.fail("two at once")
        with Workspace(tmp_path / "other", SETTINGS, resume=False):
            pass
    with Workspace(tmp_path / "out", SETTINGS, resume=False):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_compile_that_begins_does_not_clear_away_what_a_pull_writes(tmp_path: Path) -> None:
    """Compiles and pulls into one folder wait for each other's writing."""
    writing, written = Event(), list[str]()

    def pull() -> None:
        with write_lock(tmp_path / "out"), new_folder(tmp_path / "out") as folder:
            writing.set()
            sleep(0.3)
            (folder / "manifest.yaml").write_text("pulled")
            written.append("pulled")

    with ThreadPoolExecutor() as pool:
        pulling = pool.submit(pull)
        writing.wait()
        with Workspace(tmp_path / "out", SETTINGS, resume=False):
            assert written == ["pulled"]
        pulling.result()
    assert (tmp_path / "out" / "manifest.yaml").read_text() == "pulled"


def test_what_a_killed_compile_left_is_cleared_away(tmp_path: Path) -> None:
    """Killed between moving the old bundle aside and moving the new one in."""
    (tmp_path / ".out.old.abcdefgh" / "out").mkdir(parents=True)
    (tmp_path / ".out.old.abcdefgh" / "out" / "manifest.yaml").write_text("old")
    (tmp_path / ".out.new.ijklmnop").mkdir()
    with Workspace(tmp_path / "out", SETTINGS, resume=False):
        assert {path.name for path in tmp_path.iterdir()} == {"out", ".out.compile"}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "manifest.yaml").read_text() == "old"


@pytest.mark.parametrize("finished", [False, True])
def test_a_failed_compile_leaves_its_finished_stages_and_nothing_else(tmp_path: Path, finished: bool) -> None:
    with pytest.raises(UserError, match="no such model"), Workspace(tmp_path / "out", SETTINGS, resume=False) as work:
        work.begin(fingerprint())
        if finished:
            work.stage("one", lambda: 1)
        raise UserError("no such model")
    assert sorted(path.name for path in tmp_path.rglob("*.json")) == (["identity.json", "one.json"] if finished else [])
    assert work.folder.exists() == finished


def test_the_mixture_has_as_many_samples_of_each_domain_in_turn() -> None:
    for sizes, share in (((8, 8), 4), ((8, 2), 2), ((9, 9, 1), 1), ((2, 2, 2, 2), 1)):
        domains = [[Sample([domain], [1, 2], {}, [])] * size for domain, size in enumerate(sizes)]
        assert [sample.prompt for sample in mixture_of(domains)] == [
            [n] for _ in range(share) for n in range(len(sizes))
        ]


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
    assert bounds.look == 1
    with pytest.raises(FoundError) as caught:
        SearchStage(*given).search("mix", [Sample([1], [2], {}, [])])
    assert caught.value.args[0].look == 2, "a mask is looked at in every domain"


@pytest.mark.parametrize(("low", "pays"), [(0.99, False), (1.0, False), (1.01, True)])
def test_masks_pay_where_the_whole_interval_is_above_one(low: float, pays: bool) -> None:
    domain = record("one", {(2, 3): 0.9}, measured=1.1)
    assert domain.validation is not None
    assert domain.choice is not None
    timed = domain.validation.model_copy(update={"speedup_interval": (low, 1.3)})
    confirmed = {"choice": domain.choice.model_dump(), "validation": timed.model_dump()}
    found = SearchResult(
        frontier=domain.frontier, finalists=[0], context=300, oracle_speedup=1.4, worthwhile=True, cost=domain.search
    )
    work, decoder = SimpleNamespace(stage=lambda *_: confirmed), SimpleNamespace(shape=SimpleNamespace(num_layers=4))
    given: Any = (CompileSettings("m", ("one",)), decoder, frozenset(), None, latency_table(4), work, None, 1)
    prompts: Any = SimpleNamespace(validation=[[1]] * 4, max_new_tokens=9)
    assert SearchStage(*given).validate("one", found, prompts).pays is pays


def test_results_by_other_latencies_have_other_names() -> None:
    """A compile that goes on takes up none that a coarse table or other copies gave."""
    table = with_curve(latency_table(30))
    coarse = replace(table, spread={})
    lit = [with_light_costs(table, 0.5, precisions) for precisions in ((8,), (4,), (8, 4))]
    assert len({measured_on(each) for each in (table, coarse, *lit)}) == 5
