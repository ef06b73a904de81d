"""Fixtures that all tests share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from tests.clocks import take_any_machine
from tests.compiled import seeded

if TYPE_CHECKING:
    from ssd_runtime.loading.loaded_model import LoadedModel

# Models run in these tests on machines that others use too: no example has a deadline. CI draws the same examples in
# every run, so that it fails by what has changed and not by luck; developers' runs draw new ones.
settings.register_profile("house", deadline=None, max_examples=40, derandomize=bool(os.environ.get("CI")))
settings.load_profile("house")


@pytest.fixture
def any_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever other processes do, measurements of this test are taken as they are."""
    take_any_machine(monkeypatch)


@pytest.fixture(scope="session", autouse=True)
def _compiled() -> None:
    """The C code is compiled once per machine, into the user's cache, and not by every process of the tests."""
    from ssd_runtime.weights.native.library import library

    library()


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Latency tables and hashes of tests stay out of the user's cache."""
    monkeypatch.setenv("SSD_CACHE", seeded(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def made_up_latencies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines plan with made-up latencies: measuring a device takes seconds."""
    from tests.tables import table_of

    monkeypatch.setattr("ssd_runtime.engine.latency_tables.measure_latency", lambda decoder, **_: table_of(decoder))
    monkeypatch.setattr("ssd_runtime.engine.latency_tables.others_during", lambda seconds: 0.0)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved tiny model, which nobody changes."""
    from tests.folders import save_tiny_model  # imports transformers, which not all tests need

    return save_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    """The tiny model, as a user has it who called transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from ssd_runtime.loading.loaded_model import LoadedModel

    return LoadedModel.of(AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder))
