"""The first answers on a device do not wait for its measurement, which is the same whatever it waits for."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ssd_artifacts.fingerprint import file_digest
from ssd_runtime.commands.run import main
from ssd_runtime.engine.engine import Engine
from ssd_runtime.engine.latency_tables import LatencyTables
from ssd_runtime.engine.turn import RunSettings
from ssd_runtime.loading.loaded_model import LoadedModel
from ssd_runtime.loading.source import ModelSource
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.planning.auto.auto import AutoPlanner
from ssd_runtime.profiling.latency import latency_path, measure_latency
from tests.clocks import StandInMachine
from tests.commands import call_within
from tests.folders import TEXTS
from tests.hostile import QUESTION, TABLE, answer, drafting_bundle, tiny
from tests.models import tiny_model
from tests.serving import Inbox, request_for, running, tiny_engine

KEY = "k" * 64
MEASURE = "ssd_runtime.engine.latency_tables.measure_latency"


class InterruptedTestError(Exception):
    """Somebody has no time."""


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return Decoder(tiny_model("llama"))


@pytest.mark.usefixtures("any_machine")
def test_pauses_between_works_change_nothing_of_the_table(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = StandInMachine(monkeypatch)
    at_once, seconds = measure_latency(decoder), machine.time
    machine.time = 0.0
    tables = LatencyTables(decoder, None, KEY, "none", later=True)
    assert tables.is_later
    assert not tables.must_be_measured
    assert tables.provisional_for(light=False).most_queries == 8
    assert machine.time < seconds / 20
    assert tables.must_be_measured

    def pause() -> None:
        machine.time += 7.0

    tables.measure(pause)
    paused = tables.table
    assert latency_path(decoder, KEY).read_text() == paused.to_json()
    for grid in ("queries", "contexts", "wide_queries", "sequences"):
        assert getattr(paused, grid).tolist() == getattr(at_once, grid).tolist()
    for rows in (1, 5, 32, 256):
        assert paused.step_seconds(400, rows) == pytest.approx(at_once.step_seconds(400, rows))
    assert not tables.is_later


@pytest.mark.usefixtures("any_machine")
def test_a_measurement_that_is_interrupted_leaves_nothing(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    StandInMachine(monkeypatch)
    tables = LatencyTables(decoder, None, KEY, "none", later=True)
    works = 0

    def interrupt() -> None:
        nonlocal works
        works += 1
        if works == 300:
            raise InterruptedTestError

    tables.provisional_for(light=False)
    with pytest.raises(InterruptedTestError):
        tables.measure(interrupt)
    assert not latency_path(decoder, KEY).parent.exists()
    assert tables.must_be_measured
    tables.measure()
    assert latency_path(decoder, KEY).exists()
    assert not LatencyTables(decoder, None, KEY, "none", later=True).is_later, "the next run knows it"


def test_auto_drafts_by_guesses_alone_until_the_device_is_measured(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ssd_runtime.engine.latency_tables.others_during", lambda _: 0.0)
    monkeypatch.setattr(MEASURE, lambda *_, **__: TABLE)
    offered = list[int]()

    def seen(*given: Any, **named: Any) -> Any:
        sources, common = made(*given, **named)
        offered.append(len(sources) + len(common))
        return sources, common

    made = AutoPlanner.draft_sources
    monkeypatch.setattr(AutoPlanner, "draft_sources", seen)
    bundle = drafting_bundle(loaded)
    bundle.latency.clear()  # it was compiled on another device
    engine = Engine(loaded, bundle, weight_memory=0, measure_later=True)
    plain = answer(engine, "plain")
    runner = engine.runner(RunSettings(max_new_tokens=len(plain)))
    assert runner.answer(QUESTION).generation.token_ids == plain
    assert offered == [0]
    engine.measure()
    assert not engine.must_be_measured
    assert runner.answer(QUESTION).generation.token_ids == plain
    assert offered[1] > 0


@pytest.mark.parametrize(("options", "first"), [((), "answer"), (("--compare",), "measured")])
def test_an_answer_comes_before_measuring_and_a_comparison_after_it(
    options: tuple[str, ...],
    first: str,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def measured(*_: object, **__: object) -> object:
        print("MEASURED", file=sys.stdout)
        return TABLE

    monkeypatch.setattr(MEASURE, measured)
    done = call_within(monkeypatch, capsys, tmp_path, main, "-m", str(folder), "-n", "8", "Hi", *options)
    assert done.returncode == 0, done.stderr
    before, marked, after = done.stdout.partition("MEASURED\n")
    assert marked
    assert bool(before) == (first == "answer")
    assert bool(after) == (first == "measured")


def served_while(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, measure: Callable[[Callable[[], object]], None]
) -> None:
    """Let the engine's device be unknown, and `measure` measure it."""
    done = threading.Event()

    def measured(between: Callable[[], object]) -> None:
        measure(between)
        done.set()

    monkeypatch.setattr(engine, "measure", measured)
    monkeypatch.setattr(Engine, "must_be_measured", property(lambda _: not done.is_set()))


def test_a_server_answers_while_it_measures(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, inbox = tiny_engine(folder), Inbox()
    measuring, answered, complete = threading.Event(), threading.Event(), threading.Event()

    def measure(between: Callable[[], object]) -> None:
        measuring.set()
        while not answered.is_set():
            between()
        complete.set()

    served_while(engine, monkeypatch, measure)
    with running(engine) as thread:
        assert measuring.wait(60)
        thread.submit([request_for(engine, text) for text in TEXTS[:2]], inbox.listen)
        assert all(end.outcome is not None for end in inbox.wait(2).values())
        answered.set()
        assert complete.wait(60)


def test_a_server_that_measures_can_be_closed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, measuring = tiny_engine(folder), threading.Event()

    def measure(between: Callable[[], object]) -> None:
        while True:
            measuring.set()
            between()

    served_while(engine, monkeypatch, measure)
    with running(engine) as thread:
        assert measuring.wait(60)
        closer = threading.Thread(target=partial(thread.close, 0.0), daemon=True)
        closer.start()
        closer.join(60)
        assert not closer.is_alive()


def test_a_file_is_hashed_while_the_rest_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"weights")
    for model in (file, tmp_path / "none.gguf"):
        thread = ModelSource(str(model), None).read_ahead()
        assert thread is not None
        thread.join()
    assert ModelSource("demo", None).read_ahead() is None
    monkeypatch.setattr("ssd_artifacts.fingerprint.sha256_file", lambda _: pytest.fail("it is hashed again"))
    assert len(file_digest(file)) == 64
