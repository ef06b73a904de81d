"""Latencies of requests that arrive at random, by strategy: several at once, and one at a time.

`python -m bench.studies.load.arrivals --loads 0.5,0.8,1.1`

Arrivals are Poisson; 1.0 is what plain decoding of `--at-once` requests serves. Every way gets the same arrivals, in
turn. Time to first token counts from the arrival; time per token is (end - first token) ÷ (tokens - 1).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, sleep

import numpy as np
from numpy.typing import NDArray

from bench.fixtures.prompts.prompt_files import SPEC_BENCH, stratified
from bench.harness.provenance import commit
from ssd_runtime import Engine
from ssd_runtime.command import run_guarded
from ssd_runtime.engine.job import Job
from ssd_runtime.engine.loop import generating
from ssd_runtime.engine.scheduler import Scheduler
from ssd_runtime.engine.sequence.generation import Generation
from ssd_runtime.engine.sequence.output import Limits
from ssd_runtime.loading.models import conversation


@dataclass(frozen=True, slots=True)
class Way:
    """A strategy, and how many requests it decodes at once."""

    name: str
    strategy: str
    at_once: int


@dataclass(slots=True)
class Served:
    """When a request arrived, had its first token and had its last one, in seconds."""

    arrived: float
    first: float = 0.0
    last: float = 0.0
    tokens: int = 0

    def stamper(self, now: Callable[[], float]) -> Callable[[list[int]], None]:
        """Return a receiver of tokens that notes when they came."""

        def stamp(tokens: list[int]) -> None:
            self.last = now()
            self.first = self.first or self.last
            self.tokens += len(tokens)

        return stamp


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--artifact", "--bundle", type=Path)
    parser.add_argument("--model", default="demo@wheel")
    parser.add_argument("--prompts", type=Path, default=SPEC_BENCH)
    parser.add_argument("--loads", default="0.5,0.8,1.1")
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    engine = Engine.open(arguments.artifact, None if arguments.artifact else arguments.model)
    prompts = [
        engine.loaded.encode(conversation(prompt)) for prompt in stratified(arguments.prompts, arguments.requests)
    ]
    limits = Limits(arguments.new_tokens)
    ways = [
        Way("plain", "plain", arguments.at_once),
        Way("auto", "auto", arguments.at_once),
        Way("auto, one at a time", "auto", 1),
    ]
    for way in ways:
        serve(engine, way, prompts[:4], np.zeros(4), limits)  # a warm-up
    served = serve(engine, ways[0], prompts, np.zeros(len(prompts)), limits)
    capacity = len(prompts) / max(each.last for each in served)
    print(f"commit {commit()}; plain serves {capacity:.2f} requests/s of {arguments.new_tokens} new tokens", flush=True)
    for load in map(float, arguments.loads.split(",")):
        found: dict[str, list[Served]] = {way.name: [] for way in ways}
        for number in range(arguments.rounds):
            gaps = np.random.default_rng(number).exponential(1 / (load * capacity), len(prompts))
            for way in ways[number % len(ways) :] + ways[: number % len(ways)]:
                found[way.name] += serve(engine, way, prompts, np.cumsum(gaps), limits)
        for name, each in found.items():
            first = np.asarray([one.first - one.arrived for one in each])
            per_token = np.asarray([1e3 * (one.last - one.first) / (one.tokens - 1) for one in each])
            print(
                f"{load:.1f}x {name:20} first token {_percentiles(first, 's')}, "
                f"per token {_percentiles(per_token, 'ms')}",
                flush=True,
            )


def serve(
    engine: Engine, way: Way, prompts: Sequence[list[int]], arrivals: NDArray[np.float64], limits: Limits
) -> list[Served]:
    """Serve requests that arrive at the given seconds after the start."""
    scheduler, make = Scheduler(engine.decoder, way.at_once), engine.planners(way.strategy)
    served, jobs = [Served(float(at)) for at in arrivals], list[Job[Generation]]()
    began = perf_counter()

    def now() -> float:
        return perf_counter() - began

    while len(jobs) < len(prompts) or scheduler.running or scheduler.waiting:
        while len(jobs) < len(prompts) and served[len(jobs)].arrived <= now():
            ids, one, session = prompts[len(jobs)], served[len(jobs)], scheduler.session()
            jobs.append(scheduler.add(session, generating(session, ids, make(), limits, one.stamper(now)), ids))
        if scheduler.running or scheduler.waiting:
            scheduler.step()
        else:
            sleep(max(0.0, served[len(jobs)].arrived - now()))
    for job in jobs:
        job.ended()
    return served


def _percentiles(values: NDArray[np.float64], unit: str) -> str:
    half, most = np.percentile(values, [50, 99])
    return f"p50 {half:.2f} {unit}, p99 {most:.2f} {unit}"


if __name__ == "__main__":
    run_guarded(main)
