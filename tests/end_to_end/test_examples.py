"""Every script in `examples/` runs, on a tiny model, and does what it says."""

from __future__ import annotations

import json
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ssd_artifacts.bundle import Bundle
from tests.clocks import let_compiles_be_short
from tests.folders import TEXTS, save_tiny_model
from tests.serving import serving, tiny_engine, tiny_service
from tests.tables import table_of

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model, whose cache all examples share."""
    folder = tmp_path_factory.mktemp("room")
    save_tiny_model(folder / "model")
    return folder


@pytest.fixture
def run(room: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run an example with its options; returns what it printed."""
    monkeypatch.setenv("SSD_CACHE", str(room / "cache"))
    monkeypatch.chdir(room)

    def run_example(name: str, *options: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *options])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run_example


def test_the_list_of_examples_is_complete() -> None:
    listed = re.findall(r"^\| `(\w+\.py)` \|", (EXAMPLES / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted(file.name for file in EXAMPLES.glob("*.py"))


def test_speed_up(run: Callable[..., str]) -> None:
    lines = run("speed_up.py", "--model", "model", "--max-new-tokens", "12", *TEXTS[:2]).splitlines()
    assert len(lines) == 2
    for line in lines:
        assert re.search(r"tokens/s, plain +[\d.]+: [\d.]+x, output identical: ", line)


def test_stream_and_sample(run: Callable[..., str]) -> None:
    told = run("stream_and_sample.py", "--model", "model", "--max-new-tokens", "8")
    assert told.strip()
    assert told == run("stream_and_sample.py", "--model", "model", "--max-new-tokens", "8"), "a seed's output"
    assert "What is a glacier?" in told


def test_transformers_generate(run: Callable[..., str]) -> None:
    told = run("transformers_generate.py", "--model", "model", "--max-new-tokens", "12")
    assert told.startswith("1, 2, 3,")
    assert "identical: True" in told


@pytest.mark.usefixtures("any_machine")
def test_compile_domain(run: Callable[..., str], room: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    let_compiles_be_short(monkeypatch)
    monkeypatch.setattr("ssd_compiler.stages.measure_latency", table_of)
    words = " ".join(TEXTS).split()
    lines = [json.dumps({"prompt": " ".join(words[at : at + 9])}) for at in range(14)]
    (room / "mine.jsonl").write_text("\n".join(lines))
    told = run("compile_domain.py", "--model", "model", "--prompts", "mine.jsonl", "--evaluations", "8")
    assert re.search(r"of plain decoding|no mask can pay", told)
    assert list(Bundle.load(room / "bundle").domains) == ["mine"]


def test_server_client(run: Callable[..., str], room: Path) -> None:
    with serving(tiny_service(tiny_engine(room / "model"))) as address:
        told = run("server_client.py", "--url", f"{address}/v1", "--max-new-tokens", "12")
    assert re.search(r"^\S+: [\d.]+ tokens/s with auto$", told, re.MULTILINE)
