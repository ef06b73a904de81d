"""Projects compiling and serving of large shapes on n hosts from measured pieces (docs/scale.md).

    python -m bench.studies.scale.project --pieces build/pieces.json \
        --workers build/workers.json --replicas build/replicas.json

A compile is counted in forwards, whose seconds `pieces` measured; hosts are simulated as the crew uses them, step by
step, each step of all domains before the next. The count is held against the measured compile of `workers`.
"""

from __future__ import annotations

import argparse
import heapq
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.studies.scale.pieces import Pieces, load

GIB = 1 << 30
LATENCY_SECONDS = 30.0
"""Budget of measuring a device."""
CHUNK = 256
"""Rows of the forwards that prompts and replays are counted in."""


@dataclass(frozen=True)
class Task:
    """A compile: the number of domains, of prompts in each, and of masks."""

    domains: int = 9
    prompt_tokens: int = 600
    new_tokens: int = 64
    search: int = 8
    validation: int = 6
    anchors: int = 32
    evaluations: int = 24
    kept: float = 0.45
    """Forwards of all rows per mask: skipped sub-layers cost nothing, masks far behind are given up after a quarter."""
    rounds: int = 2
    """Number of timed validations."""
    asked: bool = True
    """Whether prompts have a second phrasing, whose features are computed too: those of packaged domains have."""


def steps(pieces: Pieces, task: Task) -> dict[str, float]:
    """Seconds of each step of one domain on one host."""
    prefill = _rows(pieces, task.prompt_tokens, 0)
    step = pieces.forward(1)
    replayed = task.search * (task.new_tokens - 1)
    return {
        "features": (task.search + task.anchors) * prefill,
        "calibrate": task.search * (prefill + task.new_tokens * step),
        "search": task.search * prefill + (1 + task.evaluations * task.kept) * _rows(pieces, replayed, replayed),
        # Plain decoding and drafting are about equally fast where it is worth timing; of fewer prompts all are timed.
        "validate": task.rounds * task.validation * (prefill + 2 * task.new_tokens * step),
        "anchors": task.anchors * _rows(pieces, 60, 0) if task.asked else 0.0,
    }


def _rows(pieces: Pieces, rows: int, head_rows: int) -> float:
    """Seconds of `rows` rows in forwards of `CHUNK`, with logits of some."""
    logits = pieces.head[CHUNK] * head_rows / CHUNK if head_rows else pieces.head[1]
    return pieces.shape.layers * pieces.layer[CHUNK] * max(rows, 16) / CHUNK + logits


def compile_seconds(pieces: Pieces, task: Task, hosts: int, load_seconds: float) -> dict[str, float]:
    """Seconds of a compile on so many hosts: the serial part, and each step of all domains in turn."""
    found = {"load": 2 * load_seconds if hosts > 1 else load_seconds, "latency": LATENCY_SECONDS}
    for name, seconds in steps(pieces, task).items():
        # The mixture is searched beside the domains.
        jobs = task.domains + (name == "search" and task.domains > 1)
        found[name] = makespan([seconds] * jobs, hosts)
    return found


def makespan(jobs: list[float], hosts: int) -> float:
    """Seconds until all jobs are done where each goes to the host that is free first."""
    free = [0.0] * hosts
    for seconds in jobs:
        heapq.heapreplace(free, free[0] + seconds)
    return max(free)


def served(pieces: Pieces, sequences: int) -> float:
    """Tokens per second of one host that decodes so many sequences plainly."""
    return sequences / pieces.forward(sequences, sequences)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pieces", type=Path, required=True)
    parser.add_argument("--workers", type=Path)
    parser.add_argument("--replicas", type=Path)
    parser.add_argument("--load-gib-per-second", type=float, default=1.0)
    asked = parser.parse_args()
    study, *shapes = load(asked.pieces)
    if asked.workers is not None:
        _hold_against(study, json.loads(asked.workers.read_text()))
    rate = asked.load_gib_per_second * GIB
    print("\n| shape | weights | plain step | features | calibrate | search | validate | anchors | a domain |")
    print("|---|---|---|---|---|---|---|---|---|")
    for pieces in shapes:
        cost = steps(pieces, Task())
        cells = " | ".join(_time(seconds) for seconds in cost.values())
        weights = f"{pieces.weight_bytes / GIB:.0f} GiB {pieces.shape.dtype}"
        print(
            f"| {pieces.shape.name} | {weights} | {pieces.forward(1):.2f} s | {cells} | {_time(sum(cost.values()))} |"
        )
    print("\n| shape, nine domains | " + " | ".join(f"{n} hosts" for n in (1, 2, 4, 8, 16)) + " |")
    print("|---|---|---|---|---|---|")
    for pieces in shapes:
        totals = [compile_seconds(pieces, Task(), n, pieces.weight_bytes / rate) for n in (1, 2, 4, 8, 16)]
        sums = [sum(each.values()) for each in totals]
        cells = " | ".join(f"{_time(seconds)} ({sums[0] / seconds:.1f}×)" for seconds in sums)
        print(f"| {pieces.shape.name} | {cells} |")
        last = totals[-1]
        print(f"  at 16 hosts: {', '.join(f'{name} {_time(seconds)}' for name, seconds in last.items())}")
    _serving(shapes, asked.replicas)


def _hold_against(study: Pieces, found: dict[str, Any]) -> None:
    """Print counted ÷ measured seconds of each step of the measured compile, one worker."""
    # Twelve prompts of about 60 tokens per domain: a third for the search, a third for validation. One core, not two.
    task = Task(domains=4, prompt_tokens=60, search=4, validation=4, anchors=4, evaluations=16, asked=False)
    counted = steps(study, task)
    print("| step, seconds of four domains | counted | measured |\n|---|---|---|")
    for name, seconds in counted.items():
        if name in found["one"]["by_step"]:
            jobs = task.domains + (name == "search")
            print(f"| {name} | {jobs * seconds:.0f} | {found['one']['by_step'][name]} |")


def _serving(shapes: list[Pieces], replicas: Path | None) -> None:
    print("\n| shape | one sequence | eight sequences |\n|---|---|---|")
    for pieces in shapes:
        print(f"| {pieces.shape.name} | {served(pieces, 1):.2f} tokens/s | {served(pieces, 8):.2f} tokens/s |")
    if replicas is None:
        return
    cpu = json.loads(replicas.read_text())["1 replica"]["cpu_ms_per_token"]
    for name, milliseconds in cpu.items():
        most = 1000 / milliseconds
        per_shape = ", ".join(f"{most / served(pieces, 8):.0f} of {pieces.shape.name}" for pieces in shapes)
        print(f"{name}: {milliseconds:.2f} ms of one core per token, so {most:.0f} tokens/s: replicas: {per_shape}")


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


if __name__ == "__main__":
    main()
