"""Tokens/s of one engine with n sequences, and of two engines in two processes with n ÷ 2 each.

`OMP_NUM_THREADS=1 python -m bench.studies.scale.neighbours --model demo@wheel --at 2,4,8,16,32`

No Ray and no HTTP: plain decoding with one thread per process, prompts prefilled beforehand. One engine and two take
turns of `--steps` steps. Two engines read the weights twice where one reads them once for all sequences, and they share
the host's memory bandwidth; in return they have two cores.
"""

from __future__ import annotations

import argparse
import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from time import perf_counter

import torch

from bench.fixtures.prompts.prompt_files import SPEC_BENCH, stratified
from bench.harness.provenance import commit
from bench.studies.load.concurrency import prefilled
from ssd_runtime import Engine
from ssd_runtime.command import run_guarded
from ssd_runtime.engine.offline.interleaved import SharedRun
from ssd_runtime.engine.sequence.output import Limits
from ssd_runtime.loading.models import conversation


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="demo@wheel")
    parser.add_argument("--prompts", type=Path, default=SPEC_BENCH)
    parser.add_argument("--at", default="2,4,8,16,32")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    engines: list[Connection] = []
    for number in range(2):
        ours, theirs = context.Pipe()
        context.Process(
            target=_engine, args=(theirs, number, arguments.model, arguments.prompts, arguments.steps), daemon=True
        ).start()
        engines.append(ours)
    print(f"commit {commit()}; kernels {engines[0].recv()}")
    engines[1].recv()
    for n in map(int, arguments.at.split(",")):
        rates: dict[str, list[float]] = {"one": [], "two": [], "alone": []}
        for _ in range(arguments.rounds):
            rates["one"].append(n * arguments.steps / _taken(engines[:1], n))
            rates["two"].append(n * arguments.steps / _taken(engines, n // 2))
            rates["alone"].append(n // 2 * arguments.steps / _taken(engines[:1], n // 2))
        one, two, alone = (median(rates[name]) for name in ("one", "two", "alone"))
        ratios = sorted(b / a for a, b in zip(rates["one"], rates["two"], strict=True))
        print(
            f"{n} sequences: one engine {one:.1f} tokens/s; two with {n // 2} each {two:.1f}, "
            f"{median(ratios):.2f} times ({ratios[0]:.2f}–{ratios[-1]:.2f}); "
            f"one of these with {n // 2}, the other idle: {alone:.1f}, so the second adds {two / alone - 1:.0%}",
            flush=True,
        )
    for engine in engines:
        engine.send(None)


def _taken(engines: list[Connection], sequences: int) -> float:
    """Seconds until all engines have taken their steps with so many sequences each."""
    for engine in engines:
        engine.send(sequences)
    for engine in engines:
        engine.recv()  # prefilled
    began = perf_counter()
    for engine in engines:
        engine.send(None)
    for engine in engines:
        engine.recv()
    return perf_counter() - began


def _engine(calls: Connection, number: int, model: str, prompts: Path, steps: int) -> None:
    """A process that prefills as many sequences as it is told, then takes the steps when it is told to go."""
    torch.set_num_threads(1)
    engine = Engine.open(model=model)
    limits = Limits(4 * steps)
    ids = [engine.loaded.encode(conversation(prompt))[:200] for prompt in stratified(prompts, 32)]
    calls.send(engine.decoder.kernels)
    while (sequences := calls.recv()) is not None:
        chosen = [ids[(number + i) % len(ids)] for i in range(sequences)]
        run = SharedRun(
            decoder=engine.decoder,
            held=prefilled(engine, chosen, limits),
            make_planner=engine.planners("plain"),
            sequences=sequences,
            limits=limits,
        )
        calls.send(None)
        calls.recv()
        run.steps(steps)
        calls.send(None)


if __name__ == "__main__":
    run_guarded(main)
