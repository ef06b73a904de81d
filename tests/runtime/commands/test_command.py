"""Commands and tools end with the right exit code and message."""

from __future__ import annotations

import gc
import json
import shlex
import subprocess
import sys
from importlib import import_module
from io import BytesIO, TextIOWrapper
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from ssd_compiler.bundles.cli import app as bundle_app
from ssd_compiler.progress import Reporter
from ssd_profiles.errors import UserError, require_packages
from ssd_profiles.prompts import Prompt
from ssd_runtime.commands.command import (
    BAD_INPUT,
    CLOSED_OUTPUT,
    INTERRUPTED,
    run_command,
    run_guarded,
    uncollected,
)
from ssd_runtime.commands.report import explain, report
from ssd_runtime.commands.run import _Answers, _note
from ssd_runtime.commands.run_options import OutputOptions, Prompts
from ssd_runtime.engine.output.result import Summary, Tally
from ssd_runtime.weights.dtype_names import read_dtype

COMMANDS = {
    "ssd-run": "ssd_runtime.commands.run",
    "ssd-compile": "ssd_compiler.cli",
    "ssd-serve": "ssd_runtime.commands.serve",
    "ssd-bundle": "ssd_compiler.bundles.cli",
}

ENDS: dict[str, tuple[BaseException, int, str]] = {
    "a mistake": (UserError("here: nothing; put something there"), BAD_INPUT, "here: nothing; put something there"),
    "no file": (FileNotFoundError(2, "No such file or directory", "x"), BAD_INPUT, "x: No such file or directory"),
    "interrupted": (KeyboardInterrupt(), INTERRUPTED, "interrupted"),
}


@pytest.mark.parametrize("end", ENDS)
def test_what_is_wrong_is_said_in_one_line(end: str, capsys: pytest.CaptureFixture[str]) -> None:
    error, code, says = ENDS[end]

    def main() -> None:
        raise error

    with pytest.raises(SystemExit) as ended:
        run_guarded(main)
    assert ended.value.code == code
    said = capsys.readouterr().err
    assert said.startswith(f"error: {says}")
    assert said.count("\n") == 1


def outcome(identity: str) -> Any:
    return SimpleNamespace(
        prompt=SimpleNamespace(id=identity),
        generation=SimpleNamespace(domain=None, prompt_tokens=3, cycles=()),
        to_json=lambda: {"id": identity, "speedup": None, "identical": True},
    )


def test_a_terminal_obeys_nothing_that_files_say(capsys: pytest.CaptureFixture[str]) -> None:
    evil = "a\x1b[2Jb"
    report(outcome(evil), as_json=False, compare=True)
    explain(outcome(evil))
    _note(evil)
    Reporter(Console(file=sys.stderr)).note(evil)
    Reporter(Console(file=sys.stderr)).warn(evil)
    said = capsys.readouterr()
    assert said.err.count("a?[2Jb") == 5
    assert "\x1b" not in said.out + said.err


@pytest.mark.parametrize(
    ("encoding", "written"), [("utf-8", '"né"'), ("ascii", '"n\\u00e9"'), ("latin-1", '"n\\u00e9"')]
)
def test_json_is_json_in_every_encoding(encoding: str, written: str, monkeypatch: pytest.MonkeyPatch) -> None:
    output = BytesIO()
    monkeypatch.setattr(sys, "stdout", TextIOWrapper(output, encoding, errors="backslashreplace"))
    report(outcome("né"), as_json=True, compare=False)
    assert json.loads(output.getvalue())["id"] == "né"
    assert written.encode() in output.getvalue()


MUCH = (
    "import rich.console, typer; from ssd_runtime.commands.command import run_command; app = typer.Typer()\n"
    "app.command()(lambda: [{} for _ in range(999)] and None)\n"
    "run_command(app)"
)
LITTLE = "from ssd_runtime.commands.command import run_guarded; run_guarded(lambda: [input(), print('x')] and None)"


@pytest.mark.parametrize(
    ("work", "read"),
    [
        (MUCH.format("print('x' * 9999)"), 10),
        (MUCH.format("rich.console.Console().print('x ' * 9999)"), 10),
        (LITTLE, 0),
    ],
)
def test_a_reader_that_has_enough_is_no_mistake(work: str, read: int) -> None:
    """As `ssd-run … | head`, where Typer and rich would exit with 1: the code of an output that differs.

    What is buffered finds out at the end that nobody reads, as for `ssd-bundle inspect … | true`.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", work], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdout.read(read)
    process.stdout.close()
    assert process.communicate(b"\n")[1] == b""
    assert process.returncode == CLOSED_OUTPUT


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_are_empty_ones(closed: str) -> None:
    work = (
        "import sys; from ssd_runtime.commands.command import run_guarded; "
        "run_guarded(lambda: [sys.stdin.read(), print('x'), print('y', file=sys.stderr)] and None)"
    )
    command = ["sh", "-c", f"exec {sys.executable} -c {shlex.quote(work)} {closed}"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout in ("x\n", "")
    assert done.stderr in ("y\n", "")


def shown(command: str, *options: str, **environment: str) -> str:
    """Standard output of a command under its own name, as the installed script has it."""
    app = import_module(COMMANDS[command]).app
    done = CliRunner().invoke(app, list(options), prog_name=command, env={"COLUMNS": "300", **environment})
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_panels_examples_and_exit_codes(command: str) -> None:
    told = shown(command, "--help")
    assert told.count("╭─") >= 2
    assert f" {command} " in told.partition("Usage:")[2].partition("Exit codes:")[0].rpartition("╰")[2]
    assert "130 interrupted" in told
    assert "--version" in told
    assert "--install-completion" in told


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_a_version_and_completion(command: str) -> None:
    assert shown(command, "--version").startswith("ssd-decoding ")
    variable = f"_{command.replace('-', '_').upper()}_COMPLETE"
    words = {"COMP_WORDS": f"{command} --versi", "COMP_CWORD": "1", variable: "complete_bash"}
    assert shown(command, **words).split() == ["--version"]


def test_values_complete_and_brackets_are_no_markup() -> None:
    words = {"COMP_WORDS": "ssd-run --dtype b", "COMP_CWORD": "2", "_SSD_RUN_COMPLETE": "complete_bash"}
    assert shown("ssd-run", **words).split() == ["bf16", "bfloat16"]
    assert "recorded as [redacted]." in " ".join(shown("ssd-run", "--help").split())
    assert "auto[:N]" in shown("ssd-compile", "--help")


def test_a_group_without_arguments_shows_its_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["ssd-bundle"])
    with pytest.raises(SystemExit) as ended:
        run_command(bundle_app)
    assert ended.value.code == BAD_INPUT
    told = capsys.readouterr()
    assert "OPTIONS] COMMAND" in told.out + told.err
    assert "error:" not in told.err


def test_every_command_and_the_router_of_replicas_are_imported_without_torch() -> None:
    """So that help, completion and bad input are answered at once, and the router's process is small."""
    modules = [*COMMANDS.values(), "ssd_runtime.serving.ray_app.router"]
    quick = f"import sys, {', '.join(modules)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", quick], check=False).returncode == 0


def test_garbage_is_looked_for_again_after_a_start_but_not_among_what_it_left() -> None:
    with uncollected():
        during = [gc.isenabled()]
    after = [gc.isenabled()]
    looked_through = [id(each) for each in gc.get_objects()]
    gc.unfreeze()
    assert (during, after) == ([False], [True])
    assert id(during) not in looked_through
    assert id(after) in looked_through


@pytest.mark.parametrize(
    ("given", "name"),
    [(None, None), ("fp32", "fp32"), ("float32", "fp32"), ("bfloat16", "bf16"), ("float16", "fp16")],
)
def test_dtypes_have_the_names_of_transformers_too(given: str | None, name: str | None) -> None:
    assert read_dtype(given) == name


def test_unknown_dtypes_and_missing_packages_are_said() -> None:
    with pytest.raises(UserError, match=r"--dtype: 'int8' is unknown; give one of fp32 \(float32\)"):
        read_dtype("int8")
    require_packages("ssd-some", "some", "json")
    with pytest.raises(UserError, match=r"ssd-some: nothing_such cannot be imported; .*\[some\]"):
        require_packages("ssd-some", "some", "json", "nothing_such")


@pytest.mark.parametrize(("terminal", "count", "named"), [(True, 2, True), (True, 1, False), (False, 2, False)])
def test_each_of_several_answers_is_named_where_a_person_reads_them(
    terminal: bool, count: int, named: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = [Prompt(str(number), turns=("hi",)) for number in range(count)]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    given = Prompts(prompts, from_file=True, samples=False)
    _Answers(output=OutputOptions(), prompts=given, recorder=None, summary=Summary()).begin(prompts[0])
    assert capsys.readouterr().err == ("[0]\n" if named else "")


def test_the_closing_line_counts_prompts_that_failed() -> None:
    assert Summary(failed=2, total=Tally(prompts=3, tokens=9)).closing_line.endswith("2 prompts failed")
    assert "failed" not in Summary(total=Tally(prompts=3, tokens=9)).closing_line


def test_ctrl_c_while_modules_are_imported_ends_with_one_line() -> None:
    """After that it is Python's own again."""
    code = (
        "import signal\nfrom ssd_runtime.commands.start import starting\n"
        "signal.signal(2, signal.default_int_handler)\nwith starting():\n    pass\n"
        "try:\n    signal.raise_signal(2)\nexcept KeyboardInterrupt:\n    print('raised', flush=True)\n"
        "with starting():\n    signal.raise_signal(2)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (INTERRUPTED, "raised\n", "error: interrupted\n")
