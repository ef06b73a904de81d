"""No command runs a folder's own code: not after a yes on standard input, on a terminal or without either."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.commands import COMPILE, RUN, command
from tests.folders import save_tiny_model
from tests.own_code import WAYS, with_own_code

COMMANDS = {
    "ssd-run": (RUN, ["hi", "--strategy", "plain"]),
    "ssd-serve": ("ssd_runtime.commands.serve", ["--strategy", "plain", "--port", "0"]),
    "ssd-compile": (COMPILE, ["--domains", "gsm8k", "--out", "bundle"]),
}
ASKED = [("ssd-run", "a yes"), ("ssd-run", "nothing"), *((name, "a terminal") for name in COMMANDS)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("own_code") / "model", weak=0)


@pytest.mark.parametrize(("name", "given"), ASKED)
def test_no_answer_makes_code_run(model: Path, tmp_path: Path, name: str, given: str) -> None:
    # The tokenizer is read last of all.
    mark = with_own_code(model, tmp_path / "own", WAYS["config" if name != "ssd-run" else "tokenizer"])
    code, told = asked(tmp_path, name, given)
    assert not mark.exists()
    assert code == 2
    [line] = [line for line in told.splitlines() if " INFO loading " not in line]
    assert line.startswith("error: own: ")
    assert "needs code of its own" in line


def asked(folder: Path, name: str, way: str) -> tuple[int, str]:
    """Exit code and standard error of a command, with a yes waiting on its standard input or terminal."""
    module, options = COMMANDS[name]
    terminal, its_end = os.openpty()
    try:
        os.write(terminal, b"y\n" * 9)
        given = {"a yes": b"y\n" * 9, "a terminal": Path(os.ttyname(its_end)), "nothing": b""}
        done = command(folder, module, "--model", "own", *options, given=given[way])
    finally:
        os.close(terminal)
        os.close(its_end)
    return done.returncode, done.stderr
