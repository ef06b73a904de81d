"""The demo's tables hold what was measured."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from bench import demo
from bench.demo import Contender, measure, table
from ssd_runtime.planning.settings import AutoSettings
from tests.folders import TEXTS, save_tiny_model
from tests.serving import tiny_engine


def test_both_ways_are_measured_on_every_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "MAX_NEW_TOKENS", 12)
    engine = tiny_engine(save_tiny_model(tmp_path / "model"))
    contenders = [
        Contender("guesses alone", engine, AutoSettings(light=0)),
        Contender("auto", engine, AutoSettings(light=0)),
    ]
    found = measure(contenders, {"a river": TEXTS[0], "apples": TEXTS[1]})
    for row in found.values():
        assert list(row) == ["guesses alone", "auto"]
        for outcome in row.values():
            assert outcome.to_json()["identical"] is True
            assert outcome.plain is not None
    shown = io.StringIO()
    Console(file=shown, width=120).print(table("Both", found))
    lines = shown.getvalue().splitlines()
    [river, apples, both] = [line for line in lines if re.search("a river|apples|all", line)]
    assert [re.findall(r"\b\d+\b", line)[0] for line in (river, apples, both)] == ["12", "12", "24"]
    for line in (river, apples, both):
        assert len(re.findall(r"\d+\.\d\dx", line)) == 2
