"""Commands in processes of their own, forked from one that has done the imports, which take seconds."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.clocks import take_any_machine

RUN = "ssd_runtime.commands.run"
COMPILE = "ssd_compiler.cli"
IMPORTED = (__name__, COMPILE, "ssd_compiler.search.stage", "ssd_compiler.stages", "bayes_opt", "sklearn.linear_model")
"""Modules that the commands import, at once or later."""
STREAMS = ("stdin", "stdout", "stderr")


def command(folder: Path, module: str, *options: str, given: bytes | Path = b"", **environment: str) -> Done:
    """Run the command of a module in `folder` with a cache there; `given` is its standard input, or where that is."""
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(list(IMPORTED))
    env = {**os.environ, "SSD_CACHE": str(folder / "cache"), "HF_HUB_OFFLINE": "1", **environment}
    with tempfile.TemporaryDirectory() as held:
        streams = [Path(held) / name for name in STREAMS]
        if isinstance(given, bytes):
            streams[0].write_bytes(given)
        else:
            streams[0] = given
        process = processes.Process(target=_main, args=(module, options, folder, env, streams))
        process.start()
        process.join()
        assert process.exitcode is not None
        # Not `read_text`, which would turn a carriage return of the model's into a line feed.
        shown, said = (each.read_bytes().decode() for each in streams[1:])
    return subprocess.CompletedProcess([module, *options], process.exitcode, shown, said)


Done = subprocess.CompletedProcess[str]


def _main(module: str, options: list[str], folder: Path, env: Mapping[str, str], streams: list[Path]) -> None:
    for place, (path, mode) in enumerate(zip(streams, ("rb", "wb", "wb"), strict=True)):
        with path.open(mode) as file:
            os.dup2(file.fileno(), place)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    sys.argv = ["ssd", *options]
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - multiprocessing has closed the one there was
    take_any_machine(pytest.MonkeyPatch())
    importlib.import_module(module).main()
