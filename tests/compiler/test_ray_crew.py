"""A compile by several workers, one of which is killed, gives the bundle of one process."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from ssd_artifacts.bundle import Bundle
from ssd_compiler.build import compile_bundle
from ssd_compiler.crew.crew import MakeCrew
from ssd_compiler.settings import CompileSettings
from ssd_compiler.stages import Stages
from ssd_profiles.errors import UserError
from tests.compiler.notes import Notes
from tests.folders import TEXTS, save_tiny_model, write_prompts
from tests.tables import latency_table, table_of

pytest.importorskip("ray", reason="needs the extra `ray`")
TIMED = {"validation", "choice", "pays"}
"""Fields that timing decides, which no two compiles have in common."""
OURS = latency_table(2).device
OTHER = replace(OURS, device="another processor")


def settings_of(folder: Path) -> CompileSettings:
    """Two domains of a tiny model."""
    texts = zip(("one", "two"), TEXTS, strict=False)
    files = [(name, str(write_prompts(folder / f"{name}.jsonl", text))) for name, text in texts]
    return CompileSettings(
        model=str(folder / "model"),
        domains=(),
        domain_files=tuple(files),
        device="cpu",
        evaluations=8,
        exits=2,
        search_prompts=2,
        validation_prompts=2,
        max_new_tokens=8,
    )


def portable(bundle: Bundle) -> dict[str, Any]:
    """A bundle's contents without seconds and what timing decides."""
    domains = {name: each.model_dump(mode="json", exclude=TIMED) for name, each in bundle.domains.items()}
    for domain in domains.values():
        del domain["search"]["seconds"], domain["search"]["progress"]
    anchors = bundle.anchors
    return {
        "domains": domains,
        "features": anchors.features.tolist(),
        "labels": list(anchors.labels),
        "threshold": anchors.threshold,
        "exits": bundle.exits.to_bytes() if bundle.exits is not None else None,
        "successors": bundle.successors.rows() if bundle.successors is not None else None,
    }


def kill_one_at_work(killed: list[int], stopped: threading.Event) -> None:
    """Kill the first worker that is seen at a step."""
    while not killed and not stopped.wait(0.05):
        for process in psutil.Process().children(recursive=True):
            try:
                if "Worker.run" in process.name() or "Worker.run" in " ".join(process.cmdline()):
                    os.kill(process.pid, signal.SIGKILL)
                    killed.append(process.pid)
                    return
            except psutil.Error:
                continue


@pytest.mark.parametrize(
    ("asked", "cores", "expected"),
    [
        *((1, [8] * 4, [1, 0, 0, 0]), (2, [2] * 4, [1, 1, 0, 0]), (5, [4, 4], [3, 2])),
        *((9, [2, 4], [2, 4]), (3, [64], [3]), (None, [8, 8], [1, 1]), (4, [1, 8], [1, 3]), (7, [1, 8, 2], [1, 4, 2])),
    ],
)
def test_workers_are_spread_over_hosts_that_have_room(asked: int | None, cores: list[int], expected: list[int]) -> None:
    from ssd_compiler.crew.ray_crew import Host, _workers_of

    assert _workers_of([Host(str(place), each, 0) for place, each in enumerate(cores)], asked, False) == expected


class Reference:
    """A fake answer of a worker: a value, an error, or None for one that never comes."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer


class Actor:
    """A fake worker that answers with these one after the other, to whatever it is asked."""

    def __init__(self, *answers: Any) -> None:
        self._answers = list(answers)
        self.run = self.start = self.__ray_ready__ = self

    def remote(self, *_: object) -> Reference:
        return Reference(self._answers.pop(0))


class FakeRay:
    """Ray's functions on fake references."""

    def get(self, reference: Reference) -> Any:
        if isinstance(reference.answer, Exception):
            raise reference.answer
        return reference.answer

    def wait(self, references: list[Reference], **_: object) -> tuple[list[Reference], list[Reference]]:
        return [each for each in references if each.answer is not None][:1], []

    def kill(self, actor: Actor) -> None:
        pass


@pytest.mark.parametrize(
    ("answers", "here"),
    [
        pytest.param([[True, OURS, ("there", {})], [None, None]], False, id="a host without room"),
        pytest.param([[True, OTHER], [None, None]], True, id="only a host without room may have the device"),
        pytest.param([[True, OTHER], [True, OURS, "lost", None, None]], True, id="its only host goes"),
        pytest.param([[True, OURS, "lost", True, OURS, ("there", {})]], False, id="its worker dies once"),
    ],
)
def test_a_timed_step_waits_for_no_host_that_cannot_run_it(
    answers: list[list[Any]], here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs in this process where no worker has the device, or where none is left that has it."""
    from ray.exceptions import WorkerCrashedError

    from ssd_compiler.crew import ray_crew

    monkeypatch.setattr(ray_crew, "ray", FakeRay())
    monkeypatch.setattr(ray_crew, "PATIENCE_SECONDS", -1.0)
    crew = ray_crew.RayCrew.__new__(ray_crew.RayCrew)
    crew._stages = SimpleNamespace(reporter=Notes())  # type: ignore[assignment]
    crew._crew, crew._deaths, crew._queue = [], Counter(), None
    monkeypatch.setattr(crew, "_finished", lambda *_: [])
    monkeypatch.setattr(crew, "_events", list)
    monkeypatch.setattr(crew, "_start_workers", lambda: None)
    for number, each in enumerate(answers):
        actor = Actor(*(WorkerCrashedError() if answer == "lost" else answer for answer in each))
        host = ray_crew.Host(str(number), 1, 0)
        worker = ray_crew.WorkerHandle(name=str(number), host=host, actor=actor, setup=None)  # type: ignore[arg-type]
        crew._crew.append(worker)
        crew._start(worker)

    def step(stages: Stages) -> str:
        return "here"

    assert crew.each(step, {"one": ()}, OURS) == {"one": "here" if here else "there"}


def test_workers_make_the_bundle_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """For one latency table and equal evaluations. A killed worker costs a retry; a stopped compile goes on."""
    from ssd_compiler.crew.ray_crew import RayCrew
    from ssd_runtime.serving.ray_app.ray_cluster import ray_cluster

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    save_tiny_model(tmp_path / "model")
    settings = settings_of(tmp_path)
    monkeypatch.setattr("ssd_compiler.stages.measure_latency", table_of)
    monkeypatch.setattr("ssd_compiler.patience.others_during", lambda _: 0.0)
    expected = portable(compile_bundle(settings, tmp_path / "alone", False, Notes()))

    killed: list[int] = []
    stopped = threading.Event()
    with ray_cluster("local"):
        make_crew: MakeCrew = partial(RayCrew, workers=2)
        killer = threading.Thread(target=kill_one_at_work, args=(killed, stopped))
        killer.start()
        notes = Notes()
        # The compile stops half-way, before domains are validated, and another one goes on.
        with monkeypatch.context() as broken:
            broken.setattr(Stages, "to_search", no_search)
            with pytest.raises(UserError, match="stopped"):
                compile_bundle(settings, tmp_path / "spread", False, notes, make_crew)
        stopped.set()
        killer.join()
        assert killed
        assert any("died, so it is done again" in line for line in notes.lines), notes.lines
        again = Notes()
        found = portable(compile_bundle(settings, tmp_path / "spread", True, again, make_crew))
    assert found == expected
    told = [line for line in again.lines if " s, worker " in line]
    assert any(line.startswith("one: search") for line in told)
    assert not any("calibrate" in line for line in told), "it is not done again"


def no_search(stages: Stages, samples: Callable[[], None]) -> None:
    raise UserError("stopped")
