"""A new bundle is taken up while requests run; prompts are recorded for the next one."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import regex

from ssd_artifacts.bundle import Bundle
from ssd_artifacts.sharing.opening import manifest_sha256, open_bundle
from ssd_profiles.errors import UserError
from ssd_profiles.prompts import read_prompts
from ssd_runtime.commands.options import RecordOptions
from ssd_runtime.engine.engine import Engine
from ssd_runtime.planning.makers import make_strategy
from ssd_runtime.planning.strategy import MakePlanner, StrategyInputs
from ssd_runtime.serving.http.engine_thread import EngineThread
from ssd_runtime.serving.http.metrics import Metrics
from ssd_runtime.serving.http.reload import BundleWatch
from ssd_runtime.serving.record import Recorder
from tests.bundles import bundle, fingerprint
from tests.folders import TEXTS, save_tiny_model
from tests.serving import Inbox, assert_ended_once, lone, request_for, running, tiny_engine
from tests.tables import latency_table
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), weak=0)


@pytest.fixture
def engine(model: Path) -> Engine:
    engine = tiny_engine(model)
    engine.latency = latency_table(4)
    return engine


@pytest.fixture
def thread(engine: Engine) -> Iterator[EngineThread]:
    with running(engine, places=64) as thread:
        yield thread


def bundle_of(engine: Engine, created: str) -> Bundle:
    return replace(bundle(), model=engine.loaded.fingerprint(), created=created)


@pytest.fixture
def watch(engine: Engine, thread: EngineThread, tmp_path: Path) -> BundleWatch:
    """A watch of a folder with the bundle of yesterday."""
    bundle_of(engine, "yesterday").save(tmp_path / "bundle")
    return BundleWatch(open_bundle(tmp_path / "bundle"), None, thread, Metrics("tiny"))


def test_requests_before_and_after_a_new_bundle_all_end(
    engine: Engine,
    thread: EngineThread,
    watch: BundleWatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    strategies = ["auto", "knn", "fixed:one", "lookup"]
    expected = [lone(engine, request_for(engine, text, 60)) for text in TEXTS]
    engine.use_bundle(Bundle.load(tmp_path / "bundle"))
    inbox = Inbox()
    made = list[tuple[str, str]]()

    def noted(inputs: StrategyInputs) -> MakePlanner:
        assert inputs.bundle is not None
        made.append((inputs.name, inputs.bundle.created))
        return make_strategy(inputs)

    monkeypatch.setattr("ssd_runtime.engine.stream_planners.make_strategy", noted)

    async def load() -> None:
        """Submit requests all the while, before and after the bundle changes."""
        for number in range(40):
            wanted = request_for(engine, TEXTS[number % 3], 60, strategies[number % 4])
            thread.submit([wanted], lambda _, event, number=number: inbox.listen(number, event))
            if number == 20:
                assert thread.open > 0
                bundle_of(engine, "today").save(tmp_path / "bundle")
                assert await watch.reload()
            await asyncio.sleep(0.005)

    with caplog.at_level(logging.INFO, "ssd_serve"):
        asyncio.run(load())
    ends = inbox.wait(40)
    assert_ended_once(inbox, 40)
    for number, end in ends.items():
        assert end.outcome is not None, end.error
        assert end.outcome.generation.token_ids == expected[number % 3]
    assert engine.bundle.created == "today"
    assert sorted(made) == sorted((name, day) for name in strategies for day in ("yesterday", "today"))
    assert [record.message for record in caplog.records if "took up" in record.message]


def test_a_bundle_of_another_model_is_refused_with_one_line(
    engine: Engine, thread: EngineThread, watch: BundleWatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert asyncio.run(watch.reload())
    replace(bundle(), model=fingerprint(), created="today").save(tmp_path / "bundle")

    async def twice() -> None:
        assert not await watch.reload()
        assert not await watch.reload()

    with caplog.at_level(logging.INFO, "ssd_serve"):
        asyncio.run(twice())
    assert len(caplog.records) == 1, "the same complaint is made once"
    assert "\n" not in caplog.records[0].message
    assert engine.bundle.created == "yesterday"
    inbox = Inbox()
    thread.submit([request_for(engine, TEXTS[0], 4, "knn")], inbox.listen)
    assert inbox.wait(1)[0].outcome is not None


def test_a_bundle_that_changed_while_the_model_was_loaded_is_taken_up(
    engine: Engine, watch: BundleWatch, tmp_path: Path
) -> None:
    bundle_of(engine, "today").save(tmp_path / "bundle")

    async def wait() -> None:
        polling = asyncio.create_task(watch.poll(0.01))
        await asyncio.to_thread(wait_until, lambda: engine.bundle is not None, "a bundle is taken up")
        polling.cancel()

    asyncio.run(wait())
    assert engine.bundle is not None
    assert engine.bundle.created == "today"


def test_a_bundle_that_stays_refused_is_loaded_ever_more_seldom(
    watch: BundleWatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace(bundle(), model=fingerprint(), created="today").save(tmp_path / "bundle")
    looks = list[bool]()

    class EnoughError(Exception):
        pass

    def look(folder: Path) -> str:
        looks.append(False)
        if len(looks) > 100:
            raise EnoughError
        return manifest_sha256(folder)

    def load(*_: Any) -> Any:
        looks[-1] = True
        raise UserError("it is another model's")

    monkeypatch.setattr("ssd_runtime.serving.http.reload.manifest_sha256", look)
    monkeypatch.setattr("ssd_runtime.serving.http.reload.open_bundle", load)
    with pytest.raises(EnoughError):
        asyncio.run(watch.poll(0.0))
    assert [place for place, loaded in enumerate(looks) if loaded] == [0, 2, 6, 14, 30, 62, 95]


ASKED = [("system", "Be brief."), ("user", "Write to ada@example.org, or\nring 0049 30 1234.")]


def test_a_recorded_file_is_a_prompt_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    first = Recorder(path)
    assert first.add(ASKED)
    first.close()
    assert not first.add(ASKED)
    second = Recorder(path)
    assert second.add([("user", "Grüße \U0001f600")], domain="letters")
    prompts = read_prompts(path)
    assert [prompt.messages for prompt in prompts] == [tuple(ASKED), (("user", "Grüße \U0001f600"),)]
    assert [prompt.domain for prompt in prompts] == [None, "letters"]
    assert len({prompt.id for prompt in prompts}) == 2
    assert (first.recorded, second.recorded) == (1, 1)


def test_what_would_make_the_file_unreadable_is_omitted(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    recorder = Recorder(path)
    assert not recorder.add([])
    assert not recorder.add([("user", " \n")])
    assert not recorder.add([("user", "half \ud83d")])
    assert recorder.add(ASKED)
    assert len(read_prompts(path)) == recorder.recorded == 1


def test_a_line_that_was_cut_off_spoils_no_later_one(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b"}')
    path.chmod(0o644)
    Recorder(path).add(ASKED)
    assert len(read_prompts(path)) == 3
    assert path.stat().st_mode & 0o777 == 0o600


def test_what_the_pattern_matches_is_not_stored(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    Recorder(path, redact=regex.compile(r"\S+@\S+\b|\d[\d ]+\d")).add(ASKED)
    [prompt] = read_prompts(path)
    assert prompt.messages[1][1] == "Write to [redacted], or\nring [redacted]."
    assert "ada" not in path.read_text().replace(prompt.id, "")


def test_a_pattern_that_takes_too_long_stores_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ssd_runtime.serving.record.REDACTING_SECONDS", 0.1)
    recorder = Recorder(tmp_path / "mine.jsonl", redact=regex.compile(r"(a|aa)+$"))
    assert not recorder.add([("user", "a" * 60 + "b")])
    assert recorder.add(ASKED)
    assert recorder.recorded == len(read_prompts(tmp_path / "mine.jsonl")) == 1


def test_threads_and_recorders_of_one_file_mix_no_lines(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    recorders = [Recorder(path), Recorder(path)]
    texts = [f"{place} " + "long " * 3000 for place in range(8)]

    def record(place: int) -> None:
        for _ in range(20):
            recorders[place % 2].add([("user", texts[place])])

    threads = [threading.Thread(target=record, args=(place,)) for place in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(prompt.messages[0][1] for prompt in read_prompts(path)) == sorted(texts * 20)


def test_a_full_disk_ends_the_recording_and_not_the_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorder = Recorder(Path("/dev/full"))
    assert not recorder.add(ASKED)
    assert not recorder.add(ASKED)
    assert capsys.readouterr().err == "warning: recording in /dev/full has ended (No space left on device)\n"


def test_half_a_line_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(tmp_path / "mine.jsonl")
    assert recorder.add(ASKED)
    write = os.write
    monkeypatch.setattr("ssd_runtime.serving.record.os.write", lambda file, data: write(file, data[:9]))
    assert not recorder.add(ASKED)
    assert (recorder.recorded, len(read_prompts(tmp_path / "mine.jsonl"))) == (1, 1)


WRONG = {
    "a share of nothing": ((None, 0.5, None), "--record-share: nothing is recorded"),
    "redaction of nothing": ((None, None, "a"), "--record-redact: nothing is recorded"),
    "no pattern": (("mine.jsonl", None, "("), "--record-redact: '(' is no regular expression"),
    "a folder": ((".", None, None), "--record: . cannot be written (Is a directory)"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_options_are_refused(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (path, share, pattern), says = WRONG[case]
    with pytest.raises(UserError, match=re.escape(says)):
        RecordOptions(record=None if path is None else Path(path), record_share=share, record_redact=pattern).recorder()
    assert not list(tmp_path.iterdir())
