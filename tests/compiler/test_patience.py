"""A compile waits for a busy machine, within bounds, and searches with no table that breaks the law unless asked to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ssd_artifacts.bundle import Bundle
from ssd_artifacts.manifest import MAX_DOMAINS, MAX_TABLES
from ssd_compiler.cli import _check
from ssd_compiler.patience import LOOK_SECONDS, Patience
from ssd_compiler.settings import CompileSettings
from ssd_compiler.stages import Stages
from ssd_compiler.workspace import Workspace
from ssd_profiles.errors import UserError
from ssd_profiles.latency import LatencyTable
from ssd_profiles.latency_law import broken_law
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.profiling.latency import BusyMachineError, device_key, known_latency
from tests.bundles import bundle
from tests.clocks import StandInMachine
from tests.compiler.notes import Notes
from tests.models import tiny_model
from tests.tables import DEVICE, latency_table, table_of, with_light_costs

MEASURING = 20.0
"""Seconds that a measurement takes."""


class Neighbours:
    """Stands in for other processes: they keep 1.4 of 2 processors busy for some seconds, 0.1 later."""

    def __init__(self, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = seconds
        self.time = 0.0
        monkeypatch.setattr("ssd_compiler.patience.perf_counter", lambda: self.time)
        monkeypatch.setattr("ssd_compiler.patience.others_during", self.during)
        monkeypatch.setattr("os.cpu_count", lambda: 2)
        monkeypatch.setattr("ssd_compiler.stages.working_threads", lambda _: 2)

    @property
    def busy(self) -> float:
        return 1.4 if self.time < self.seconds else 0.1

    def during(self, seconds: float) -> float:
        self.time += seconds
        return self.busy

    def measure(self) -> LatencyTable:
        """A table that is sound if they have ended."""
        self.time += MEASURING
        if self.busy > 1.0:
            coarse = replace(latency_table(4), spread={})
            raise BusyMachineError("a step with 1 row takes -970.00 ms and its parts 10.00 ms", self.busy, coarse)
        return latency_table(4)


def test_a_quiet_machine_is_measured_once_and_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    others, notes = Neighbours(0.0, monkeypatch), Notes()
    assert broken_law(Patience().measured(others.measure, 2, notes)) is None
    assert (others.time, notes.lines) == (LOOK_SECONDS + MEASURING, [])


def test_a_busy_machine_is_measured_when_others_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    others, notes = Neighbours(100.0, monkeypatch), Notes()
    assert broken_law(Patience().measured(others.measure, 2, notes)) is None
    assert others.time <= 100.0 + LOOK_SECONDS + MEASURING
    assert notes.lines == [
        "other processes keep 1.4 of 2 processors busy: waiting for them before this device is measured, 5 min at most "
        "(--max-wait); Ctrl-C stops"
    ]
    assert notes.ticks == pytest.approx(100.0 / LOOK_SECONDS, abs=1)


@pytest.mark.parametrize("seconds", [1.0, 60.0, 300.0])
def test_the_wait_is_bounded_and_ends_in_one_line(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    others, notes = Neighbours(1e9, monkeypatch), Notes()
    with pytest.raises(UserError) as caught:
        Patience(seconds).measured(others.measure, 2, notes)
    assert others.time <= seconds + MEASURING
    said = str(caught.value)
    assert "\n" not in said
    assert "other processes keep 1.4 of 2 processors busy" in said
    assert all(option in said for option in ("--threads", "--max-wait", "--resume", "--coarse"))


@pytest.fixture
def stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stages]:
    """The stages of a compile on a machine that is noisy by itself: passes take 15 times as long in turns."""
    decoder = Decoder(tiny_model("llama"))
    fingerprint = bundle().model
    settings = CompileSettings("m", ("one",))
    Neighbours(0.0, monkeypatch)
    StandInMachine(monkeypatch, lambda time: 15.0 if int(time / 0.023) % 2 else 1.0)
    with Workspace(tmp_path / "out", settings, False) as work:
        work.begin(fingerprint)
        yield Stages(
            settings=settings,
            loaded=SimpleNamespace(),  # type: ignore[arg-type]
            decoder=decoder,
            fingerprint=fingerprint,
            work=work,
            reporter=Notes(),
        )


def test_a_compile_does_not_search_with_a_busy_machines_table(stages: Stages) -> None:
    with pytest.raises(UserError, match=r"^this device cannot be measured now: .*--coarse latencies$"):
        stages.latency()
    assert not list(stages.work.folder.glob("latency*"))  # type: ignore[attr-defined]


def bundled(stages: Stages, latency: LatencyTable) -> Bundle:
    made: Any = bundle()
    return stages.bundle(latency, made.domains, {}, made.anchors, None, made.successors)


def test_a_coarse_table_is_used_if_asked_for_and_never_kept(stages: Stages) -> None:
    stages.patience = Patience(60.0, coarse=True)
    table = stages.latency()
    assert broken_law(table) is not None
    assert table.step_seconds(16) > 0
    assert any("coarse latencies, which stay out of the bundle" in line for line in stages.reporter.lines)  # type: ignore[attr-defined]
    assert not list(stages.work.folder.glob("latency*"))  # type: ignore[attr-defined]
    assert bundled(stages, table).latency == {}
    sound = table_of(stages.decoder)
    assert list(bundled(stages, sound).latency) == [sound.device.slug()]


def test_a_sound_table_stays_where_only_the_light_copies_could_not_be_measured(
    stages: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages.decoder.lighten("auto")
    sound = table_of(stages.decoder)
    measured = list[str]()

    def dense(_: Decoder) -> LatencyTable:
        measured.append("dense")
        return sound

    def copies(table: LatencyTable, *_: object) -> LatencyTable:
        raise BusyMachineError("the times spread too far", 1.4, replace(with_light_costs(table, 0.5), spread={}))

    monkeypatch.setattr("ssd_compiler.stages.measure_latency", dense)
    monkeypatch.setattr("ssd_compiler.stages.with_light", copies)
    with pytest.raises(UserError, match="--coarse latencies"):
        stages.latency()
    stages.patience = Patience(60.0, coarse=True)
    table = stages.latency()
    assert table.mlp.tolist() == pytest.approx(sound.mlp.tolist(), rel=1e-5)
    assert table.light
    assert broken_law(table) is not None
    assert measured == ["dense"]


def test_a_device_is_measured_once_for_all_compiles_and_runs(
    stages: Stages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = list[LatencyTable]()

    def measure(decoder: Decoder) -> LatencyTable:
        measured.append(table_of(decoder))
        return measured[-1]

    monkeypatch.setattr("ssd_compiler.stages.measure_latency", measure)
    expected = stages.latency().to_json()
    with Workspace(tmp_path / "another", stages.settings, False) as work:
        work.begin(stages.fingerprint)
        assert replace(stages, work=work).latency().to_json() == expected
    known = known_latency(stages.decoder, {}, stages.fingerprint.config_sha256)
    assert known is not None
    assert known.to_json() == expected
    assert len(measured) == 1


def test_a_base_of_another_quantisation_is_not_extended(stages: Stages) -> None:
    """Its domains' acceptance would pass for one that was measured on these weights."""
    made = bundle()
    base = replace(made, model=made.model.model_copy(update={"quantization": "packed Q4_0"}))
    with pytest.raises(UserError, match="compiled for weights in packed Q4_0, the model has none"):
        replace(stages, base=base)


def test_a_bundle_that_is_full_is_not_extended(stages: Stages, tmp_path: Path) -> None:
    """Neither early nor after all work is its limit a traceback."""
    made = bundle()
    full = replace(made, latency={f"d{number}": made.latency[DEVICE.slug()] for number in range(MAX_TABLES)})
    with pytest.raises(UserError, match="has 256 latency tables"):
        replace(stages, base=full)
    replace(stages, base=replace(full, latency={device_key(stages.decoder).slug(): None, **made.latency}))
    many = {f"d{number}": made.domains["one"] for number in range(MAX_DOMAINS)}
    with pytest.raises(UserError, match="257 domains in all"):
        _check(CompileSettings("m", ("cnn",), base="b"), replace(made, domains=many), tmp_path / "out")
    for beyond in (replace(made, domains=many | made.domains), replace(full, latency=full.latency | made.latency)):
        with pytest.raises(UserError, match="no bundle holds this"):
            beyond.save(tmp_path / "full")
    assert not (tmp_path / "full").exists()
