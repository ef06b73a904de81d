"""A compile by several workers, one of which is killed, gives the bundle of one process."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from ssd_artifacts.bundle import Bundle
from ssd_compiler.build import compile_bundle
from ssd_compiler.crew.crew import MakeCrew
from ssd_compiler.progress import Reporter
from ssd_compiler.settings import CompileSettings
from ssd_compiler.stages import Stages
from ssd_profiles.errors import UserError
from tests.folders import TEXTS, save_tiny_model
from tests.tables import latency_table

pytest.importorskip("ray", reason="needs the extra `ray`")
TIMED = {"validation", "choice", "pays"}
"""Fields that timing decides, which no two compiles have in common."""


class Notes(Reporter):
    """Keeps what a compile says."""

    def __init__(self) -> None:
        super().__init__(Console(quiet=True))
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self.lines.append(text)

    def warn(self, text: str) -> None:
        self.lines.append(f"warning: {text}")


def settings_of(folder: Path) -> CompileSettings:
    """Two domains of a tiny model."""
    files = []
    for number, name in enumerate(("one", "two")):
        words = TEXTS[number].split()
        path = folder / f"{name}.jsonl"
        path.write_text("\n".join(json.dumps({"prompt": " ".join(words[i % 5 : 6 + i])}) for i in range(14)))
        files.append((name, str(path)))
    return CompileSettings(
        model=str(folder / "model"),
        domains=(),
        domain_files=tuple(files),
        device="cpu",
        evaluations=8,
        exits=2,
        search_prompts=2,
        validation_prompts=2,
        max_new_tokens=16,
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
    while not killed and not stopped.wait(0.005):
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
        *((9, [2, 4], [2, 4]), (3, [64], [3]), (None, [8, 8], [1, 1])),
    ],
)
def test_workers_are_spread_over_hosts_that_have_room(asked: int | None, cores: list[int], expected: list[int]) -> None:
    from ssd_compiler.crew.ray_crew import Host, _workers_of

    assert _workers_of([Host(str(place), each, 0) for place, each in enumerate(cores)], asked, False) == expected


def test_workers_make_the_bundle_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """For one latency table and equal evaluations. A killed worker costs a retry; a stopped compile goes on."""
    from ssd_compiler.crew.ray_crew import RayCrew
    from ssd_runtime.serving.ray_app.ray_cluster import ray_cluster

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    save_tiny_model(tmp_path / "model")
    settings = settings_of(tmp_path)
    monkeypatch.setattr("ssd_compiler.stages.measure_latency", made_up)
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


def made_up(decoder: Any) -> Any:
    """A latency table of this device that nobody measured."""
    from ssd_runtime.profiling.latency import device_key

    return replace(latency_table(decoder.shape.num_layers), device=device_key(decoder))


def no_search(stages: Stages, samples: Callable[[], None]) -> None:
    raise UserError("stopped")
