"""A new bundle is taken up while requests run, or refused while the old one stays."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ssd_artifacts.bundle import Bundle
from ssd_artifacts.manifest import MANIFEST
from ssd_artifacts.sharing.signature import sign
from ssd_runtime.engine.engine import Engine
from ssd_runtime.planning.makers import make_strategy
from ssd_runtime.planning.strategy import MakePlanner
from ssd_runtime.serving.http.engine_thread import EngineThread
from ssd_runtime.serving.http.metrics import Metrics
from ssd_runtime.serving.http.reload import BundleWatch
from tests.bundles import bundle, fingerprint
from tests.folders import TEXTS, save_tiny_model
from tests.keys import key_pair
from tests.serving import Inbox, assert_ended_once, lone, request_for, running, tiny_engine
from tests.tables import latency_table


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


def test_requests_before_and_after_a_new_bundle_all_end(
    engine: Engine,
    thread: EngineThread,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bundle_of(engine, "yesterday").save(tmp_path / "bundle")
    watch = BundleWatch(tmp_path / "bundle", None, thread, Metrics("tiny"))
    strategies = ["auto", "knn", "fixed:one", "lookup"]
    expected = [lone(engine, request_for(engine, text, 60)) for text in TEXTS]
    engine.use_bundle(Bundle.load(tmp_path / "bundle"))
    inbox = Inbox()
    made = list[tuple[str, str]]()

    def noted(*, name: str, bundle: Bundle, **others: Any) -> MakePlanner:
        made.append((name, bundle.created))
        return make_strategy(name=name, bundle=bundle, **others)

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
    assert engine.bundle is not None
    assert engine.bundle.created == "today"
    assert sorted(made) == sorted((name, day) for name in strategies for day in ("yesterday", "today"))
    assert [record.message for record in caplog.records if "took up" in record.message]


def test_a_bundle_of_another_model_is_refused_with_one_line(
    engine: Engine, thread: EngineThread, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bundle_of(engine, "yesterday").save(tmp_path / "bundle")
    watch = BundleWatch(tmp_path / "bundle", None, thread, Metrics("tiny"))
    assert asyncio.run(watch.reload())
    replace(bundle(), model=fingerprint(), created="today").save(tmp_path / "bundle")

    async def twice() -> None:
        assert not await watch.reload()
        assert not await watch.reload()

    with caplog.at_level(logging.INFO, "ssd_serve"):
        asyncio.run(twice())
    assert len(caplog.records) == 1, "the same complaint is made once"
    assert "\n" not in caplog.records[0].message
    assert engine.bundle is not None
    assert engine.bundle.created == "yesterday"
    inbox = Inbox()
    thread.submit([request_for(engine, TEXTS[0], 4, "knn")], inbox.listen)
    assert inbox.wait(1)[0].outcome is not None


def test_with_a_key_only_what_it_signed_is_taken_up(engine: Engine, thread: EngineThread, tmp_path: Path) -> None:
    private, public = key_pair(tmp_path, "mine")
    bundle_of(engine, "yesterday").save(tmp_path / "bundle")
    sign(tmp_path / "bundle", private)
    watch = BundleWatch(tmp_path / "bundle", public, thread, Metrics("tiny"))
    assert asyncio.run(watch.reload())
    bundle_of(engine, "today").save(tmp_path / "bundle")
    assert not asyncio.run(watch.reload())
    sign(tmp_path / "bundle", private)
    assert asyncio.run(watch.reload())
    assert engine.bundle is not None
    assert engine.bundle.created == "today"


def test_a_folder_that_is_still_being_copied_is_taken_up_once_it_is_whole(
    engine: Engine, thread: EngineThread, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And not again after that."""
    bundle_of(engine, "yesterday").save(tmp_path / "bundle")
    bundle_of(engine, "today").save(tmp_path / "new")
    watch = BundleWatch(tmp_path / "bundle", None, thread, Metrics("tiny"))

    async def copy() -> None:
        polling = asyncio.ensure_future(watch.poll(0.01))
        for file in (tmp_path / "bundle").rglob("*.yaml"):
            file.unlink()
        await asyncio.sleep(0.1)
        shutil.copy(tmp_path / "new" / MANIFEST, tmp_path / "bundle" / MANIFEST)
        await asyncio.sleep(0.1)
        assert engine.bundle is None
        shutil.copytree(tmp_path / "new", tmp_path / "bundle", dirs_exist_ok=True)
        for _ in range(500):
            await asyncio.sleep(0.01)
            if engine.bundle is not None:
                break
        await asyncio.sleep(0.3)
        polling.cancel()

    with caplog.at_level(logging.INFO, "ssd_serve"):
        asyncio.run(copy())
    assert len([record for record in caplog.records if "took up" in record.message]) == 1
    assert engine.bundle is not None
    assert engine.bundle.created == "today"
