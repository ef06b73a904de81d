"""Mutated model folders: one line, or the right answer, in bounded time and memory, and no code or question."""

from __future__ import annotations

import json
import os
from collections import Counter
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.commands import begin
from tests.folder_trials import Trial

COUNT = int(os.environ.get("SSD_FOLDER_MUTATIONS", "100"))
MOST_SECONDS = 20.0
"""Processor time that any one folder may take: to be read, to be checked and to decode a few tokens."""
MOST_GROWTH = 256 << 20
"""Bytes by which the process may grow for any one folder."""
MOST_MEMORY = 4 << 30
"""Bytes at which the process is ended, so that a fault does not end the machine."""


@pytest.mark.hostile
def test_a_mutated_folder_is_refused_in_one_line_or_answers_as_it_should(tmp_path: Path) -> None:
    trials = tried(tmp_path)
    assert not [trial for trial in trials if trial.outcome not in ("refused", "decoded")]
    assert not [trial for trial in trials if trial.seconds > MOST_SECONDS or trial.grown > MOST_GROWTH]
    told = [trial.told for trial in trials if trial.outcome == "refused"]
    assert not [line for line in told if not line.isprintable() or len(line) > 600 or "memory" in line]
    outcomes = Counter(trial.outcome for trial in trials)
    assert len(trials) == COUNT
    assert COUNT < 100 or min(outcomes["decoded"], outcomes["refused"]) > COUNT // 10, outcomes


def tried(folder: Path) -> list[Trial]:
    """The trials of all seeds, in a process that ends with the first that takes far too much memory."""
    (folder / "models").mkdir()
    streams = [folder / name for name in ("yes.txt", "trials.jsonl", "errors.txt")]
    streams[0].write_text("y\n" * 1000)
    process = begin(folder, "tests.folder_trials", "models", "0", str(COUNT), streams=streams)
    while process.is_alive():
        process.join(0.2)
        with suppress(psutil.NoSuchProcess):
            if psutil.Process(process.pid).memory_info().rss > MOST_MEMORY:
                process.kill()
    # Libraries in Rust print to standard output, too.
    lines = streams[1].read_text().splitlines()
    trials = [Trial(**json.loads(line)) for line in lines if line.startswith('{"seed"')]
    assert process.exitcode == 0, (trials[-1:], streams[2].read_text()[-2000:])
    return trials
