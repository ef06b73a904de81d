"""Commands in processes of their own, forked from one that has done the imports, which take seconds."""

from __future__ import annotations

import importlib
import io
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from tests.clocks import let_compiles_be_short, take_any_machine
from tests.compiled import seeded

RUN = "ssd_runtime.commands.run"
COMPILE = "ssd_compiler.cli"
SERVE = "ssd_runtime.commands.serve"
IMPORTED = (
    *(__name__, COMPILE, "ssd_compiler.search.stage", "ssd_compiler.stages", "bayes_opt", "sklearn.linear_model"),
    *(SERVE, "ssd_runtime.serving.http.opening", "ssd_runtime.serving.http.server"),
)
"""Modules that the commands import, at once or later."""
STREAMS = ("stdin", "stdout", "stderr")


def command(
    folder: Path,
    module: str,
    *options: str,
    given: bytes | Path = b"",
    beside: Callable[[BaseProcess], object] = lambda _: None,
    **environment: str,
) -> Done:
    """Run the command of a module in `folder` with a cache there; `given` is its standard input, or where that is.

    `beside` is called with the command's process while that runs.
    """
    with tempfile.TemporaryDirectory() as held:
        streams = [Path(held) / name for name in STREAMS]
        if isinstance(given, bytes):
            streams[0].write_bytes(given)
        else:
            streams[0] = given
        process = begin(folder, module, *options, streams=streams, **environment)
        beside(process)
        process.join()
        assert process.exitcode is not None
        # Not `read_text`, which would turn a carriage return of the model's into a line feed.
        shown, said = (each.read_bytes().decode() for each in streams[1:])
    return subprocess.CompletedProcess([module, *options], process.exitcode, shown, said)


def begin(folder: Path, module: str, *options: str, streams: Sequence[Path], **environment: str) -> BaseProcess:
    """Start the command of a module in `folder` with a cache there; `streams` are where its standard streams are."""
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(list(IMPORTED))
    env = {**os.environ, "SSD_CACHE": seeded(folder / "cache"), "HF_HUB_OFFLINE": "1", **environment}
    process = processes.Process(target=_main, args=(module, options, folder, env, streams))
    process.start()
    return process


Done = subprocess.CompletedProcess[str]
Within = Callable[..., Done]
"""Runs a command: its folder, its main function and its options."""


def call_within(
    patch: pytest.MonkeyPatch,
    captured: pytest.CaptureFixture[str],
    folder: Path,
    main: Callable[[], None],
    *options: str,
) -> Done:
    """Run a command inside this process, which saves the seconds that its imports take."""
    take_any_machine(patch)
    let_compiles_be_short(patch)
    patch.chdir(folder)
    patch.setenv("SSD_CACHE", str(folder / "cache"))
    patch.setenv("HF_HUB_OFFLINE", "1")
    patch.setattr(sys, "argv", ["ssd", *options])
    patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    with pytest.raises(SystemExit) as ended:
        main()
    shown = captured.readouterr()
    assert isinstance(ended.value.code, int)
    return subprocess.CompletedProcess(options, ended.value.code, shown.out, shown.err)


def compile_options(out: str, evaluations: int = 24, exits: int = 3, loads: str = "3,1") -> list[str]:
    """Options that compile a bundle of two files of prompts."""
    files = [f"--domain-file={name}={name}.jsonl" for name in ("rivers", "apples")]
    searched = ["--evaluations", str(evaluations), "--device", "cpu", "--exits", str(exits), "--concurrency", loads]
    return ["--model", "model", *files, "--out", out, *searched]


def records(done: Done) -> list[dict[str, Any]]:
    """The lines of JSON of a command that has ended well."""
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.split("\n") if line]


def one_line(done: Done) -> str:
    """The line of error of a command that has said nothing else there."""
    assert done.returncode == 2, (done.stdout, done.stderr)
    [line] = done.stderr.splitlines()
    assert line.startswith("error: ")
    return line


def assert_refused(done: Done, says: str) -> None:
    """The command has said what is wrong in one line, and nothing else."""
    assert done.returncode == 2, (done.stdout, done.stderr)
    assert done.stdout == ""
    lines = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(lines) == 1
    assert "Traceback" not in done.stderr
    assert re.search(says, lines[0]), lines[0]


def _main(module: str, options: Sequence[str], folder: Path, env: Mapping[str, str], streams: Sequence[Path]) -> None:
    os.setsid()  # a terminal that is opened now is this process's own
    for place, (path, mode) in enumerate(zip(streams, ("rb", "wb", "wb"), strict=True)):
        with path.open(mode) as file:
            os.dup2(file.fileno(), place)
    os.environ.clear()
    os.environ.update(env)
    if "HF_ENDPOINT" in env:  # which the Hub's client reads when it is imported
        for name in [name for name in sys.modules if name.partition(".")[0] == "huggingface_hub"]:
            del sys.modules[name]
    os.chdir(folder)
    sys.argv = ["ssd", *options]
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - multiprocessing has closed the one there was
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 - the one there was does not know of a terminal
    take_any_machine(pytest.MonkeyPatch())
    let_compiles_be_short(pytest.MonkeyPatch())
    # What a shell starts in the background ignores Ctrl-C, and so would this.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    importlib.import_module(module).main()
