"""Fixtures of commands as users run them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.commands import COMPILE, Within, call_within, command, compile_options
from tests.folders import TEXTS, save_tiny_model, write_prompts


@pytest.fixture(scope="session")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, two prompt files and a compiled bundle."""
    folder = tmp_path_factory.mktemp("room")
    save_tiny_model(folder / "model")
    for name, text in (("rivers", TEXTS[0]), ("apples", TEXTS[1])):
        write_prompts(folder / f"{name}.jsonl", text, category=name)
    done = command(folder, COMPILE, *compile_options("bundle"), "--json")
    assert done.returncode == 0, done.stderr
    (folder / "compiled.json").write_text(done.stdout)
    return folder


@pytest.fixture
def within(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Within:
    """Runs a command in a folder, inside this process."""
    return lambda folder, main, *options: call_within(monkeypatch, capfd, folder, main, *options)
