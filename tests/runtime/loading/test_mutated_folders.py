"""Mutated model folders: one line, or the right answer, in bounded time and memory, and no code or question."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from tests.folder_trials import Trial

COUNT = int(os.environ.get("SSD_FOLDER_MUTATIONS", "100"))
ROOT = Path(__file__).parents[3]
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
    command = [sys.executable, "-m", "tests.folder_trials", str(folder / "models"), "0", str(COUNT)]
    with (folder / "trials.jsonl").open("w") as out, (folder / "errors.txt").open("w") as errors:
        process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=out, stderr=errors, text=True)
        process.stdin.write("y\n" * 1000)
        process.stdin.close()
        while process.poll() is None:
            time.sleep(0.2)
            if psutil.Process(process.pid).memory_info().rss > MOST_MEMORY:
                process.kill()
    # Libraries in Rust print to standard output, too.
    lines = (folder / "trials.jsonl").read_text().splitlines()
    trials = [Trial(**json.loads(line)) for line in lines if line.startswith('{"seed"')]
    assert process.returncode == 0, (trials[-1:], (folder / "errors.txt").read_text()[-2000:])
    return trials
