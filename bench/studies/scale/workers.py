"""A compile of four domains by one worker, by two, and by two of which one is killed: seconds, and the same masks.

    OMP_NUM_THREADS=1 python -m bench.studies.scale.workers --model build/shaped \
        --prompts build/prompts/spec_bench/dev.jsonl --out build/workers.json

All have one latency table, which is measured first, and one thread per worker. Domains are categories of the prompts.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from ssd_artifacts.bundle import Bundle
from ssd_compiler.build import compile_bundle
from ssd_compiler.crew.ray_crew import RayCrew
from ssd_compiler.progress import Reporter
from ssd_compiler.settings import CompileSettings
from ssd_compiler.workspace import Workspace
from ssd_profiles.prompts import read_prompts
from ssd_runtime.loading.models import load_model
from ssd_runtime.profiling.latency import measure_latency
from ssd_runtime.ray_cluster import ray_cluster
from ssd_runtime.weights.kernel_choice import fitted_decoder

MOST_CHARACTERS = 800
PROMPTS = 12
"""Prompts per domain: four for the search, four for validation, four for anchors."""
STEP = re.compile(r"(\S+): (features|calibrate|search|validate|anchors): (\d+) s, (worker \d+)")


class Noted(Reporter):
    """Keeps what a compile says, with the moments."""

    def __init__(self, on_note: Callable[[str], None]) -> None:
        super().__init__(Console(quiet=True))
        self._on_note = on_note
        self.began = time.perf_counter()
        self.lines: list[tuple[float, str]] = []

    def note(self, text: str) -> None:
        """Keep a line."""
        self.lines.append((round(time.perf_counter() - self.began, 1), text))
        self._on_note(text)

    def warn(self, text: str) -> None:
        """Keep a warning."""
        self.note(f"warning: {text}")


def domain_files(prompts: Path, count: int, folder: Path) -> tuple[tuple[str, str], ...]:
    """Write short prompts of `count` categories as files of domains; categories of few prompts make one together."""
    found = defaultdict[str, list[str]](list)
    for prompt in read_prompts(prompts):
        if prompt.category is not None and prompt.turns and len(prompt.turns[0]) < MOST_CHARACTERS:
            found[re.sub(r"[^a-z0-9]", "-", prompt.category.lower())].append(prompt.turns[0])
    few = [text for texts in found.values() if len(texts) < PROMPTS for text in texts]
    domains = {name: texts for name, texts in found.items() if len(texts) >= PROMPTS} | {"various": few}
    files = []
    for name, texts in list(domains.items())[:count]:
        path = folder / f"{name}.jsonl"
        path.write_text("\n".join(json.dumps({"prompt": text}) for text in texts[:PROMPTS]))
        files.append((name, str(path)))
    return tuple(files)


def kill_a_worker() -> None:
    """Kill a worker that runs a step."""
    for process in psutil.Process().children(recursive=True):
        if "Worker.run" in process.name():
            os.kill(process.pid, signal.SIGKILL)
            return
    raise RuntimeError("no worker is at work")


def masks(bundle: Bundle) -> dict[str, Any]:
    """Every mask of every frontier with its acceptance."""
    return {
        name: [entry.model_dump(mode="json") for entry in config.frontier] for name, config in bundle.domains.items()
    }


def killer() -> Callable[[str], None]:
    """A listener to notes that kills a worker once the first domain is calibrated, while one is at the next."""
    left = [True]

    def on_note(text: str) -> None:
        if left and ": calibrate:" in text:
            left.clear()
            threading.Timer(0.2, kill_a_worker).start()

    return on_note


def figures(reporter: Noted, same_masks: bool) -> dict[str, Any]:
    """Wall seconds, the seconds of all workers' steps by kind, and whether the masks are those of one worker."""
    steps = defaultdict[str, int](int)
    for _, line in reporter.lines:
        if match := STEP.match(line):
            steps[match[2]] += int(match[3])
    return {
        "seconds": round(time.perf_counter() - reporter.began, 1),
        "by_step": dict(steps),
        "died": [line for _, line in reporter.lines if "died" in line],
        "same_masks": same_masks,
        "lines": reporter.lines,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--evaluations", type=int, default=16)
    parser.add_argument("--domains", type=int, default=4)
    parser.add_argument("--folder", type=Path, default=Path("build/workers"))
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    shutil.rmtree(asked.folder, ignore_errors=True)
    asked.folder.mkdir(parents=True)
    settings = CompileSettings(
        model=asked.model,
        domains=(),
        domain_files=domain_files(asked.prompts, asked.domains, asked.folder),
        device="cpu",
        evaluations=asked.evaluations,
    )
    loaded = load_model(asked.model, "cpu", None, "dense")
    fingerprint = loaded.fingerprint(full=True)
    latency = measure_latency(fitted_decoder(loaded.model, None), budget_seconds=8.0)
    del loaded
    found: dict[str, Any] = {"domains": [name for name, _ in settings.domain_files]}
    made: dict[str, Bundle] = {}
    with ray_cluster("local"):
        for name, workers, killed in (("one", 1, False), ("two", 2, False), ("two, one killed", 2, True)):
            out = (asked.folder / name.replace(", ", "-").replace(" ", "-")).resolve()
            with Workspace(out, settings, resume=False) as work:
                work.begin(fingerprint)
                work.keep(f"latency-{latency.device.slug()}", latency.to_json())
            reporter = Noted(killer() if killed else lambda text: None)
            made[name] = compile_bundle(settings, out, True, reporter, partial(RayCrew, workers=workers))
            found[name] = figures(reporter, masks(made[name]) == masks(made["one"]))
            print(json.dumps({name: {key: value for key, value in found[name].items() if key != "lines"}}), flush=True)
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
