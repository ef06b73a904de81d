"""Times plain decoding beside busy processes, by how long threads spin while they wait for each other.

`python -m bench.studies.steps.busy_machine --model demo@wheel --busy 2 --spins default,30000,10000 --threads 2,1`

An operation on several threads ends when its last thread does. Where another process holds a processor, the others
wait, and GNU's OpenMP lets them spin meanwhile, up to GOMP_SPINCOUNT times. Every figure is a process of its own,
because the variable is read at start; settings take turns. `--busy 0` is the quiet machine.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections import defaultdict
from itertools import product
from statistics import median
from time import perf_counter

from ssd_runtime.command import run_guarded
from ssd_runtime.engine.engine import Engine
from ssd_runtime.engine.loop import generate
from ssd_runtime.engine.sequence.output import Limits
from ssd_runtime.engine.sequence.session import Session
from ssd_runtime.planning.plan import PlainPlanner

DEFAULT = "default"
WORK = "import torch; torch.set_num_threads(1); x = torch.rand(1024, 1024)\nwhile True: x @ x"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="demo@wheel")
    parser.add_argument("--busy", type=int, default=1, help="processes that multiply matrices on one thread each")
    parser.add_argument("--spins", default="default,30000", help="values of GOMP_SPINCOUNT, comma-separated")
    parser.add_argument("--threads", default="2,1")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=24)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(milliseconds_per_token(arguments.model, arguments.max_new_tokens))
        return
    options = ["--model", arguments.model, "--max-new-tokens", str(arguments.max_new_tokens)]
    found = defaultdict[tuple[str, str], list[float]](list)
    others = [subprocess.Popen([sys.executable, "-c", WORK]) for _ in range(arguments.busy)]
    try:
        for _ in range(arguments.rounds):
            for threads, spins in product(arguments.threads.split(","), arguments.spins.split(",")):
                given = {"OMP_NUM_THREADS": threads} | ({} if spins == DEFAULT else {"GOMP_SPINCOUNT": spins})
                command = [sys.executable, "-m", "bench.studies.steps.busy_machine", "--one", *options]
                done = subprocess.run(command, env=os.environ | given, capture_output=True, text=True, check=True)
                found[threads, spins].append(float(done.stdout))
    finally:
        for other in others:
            other.kill()
    print(f"{arguments.busy} busy processes, {os.cpu_count()} processors; ms per token, medians of processes")
    for (threads, spins), values in found.items():
        shown = f"{median(values):6.1f} ({min(values):.1f} to {max(values):.1f})"
        print(f"threads {threads}, GOMP_SPINCOUNT {spins:>8}: {shown}")


def milliseconds_per_token(model: str, tokens: int) -> float:
    """Milliseconds of a plain step, the prefill left out."""
    engine = Engine.open(model=model)
    ids = engine.loaded.encode([("user", "Tell me a story about a fox.")])
    generate(Session(engine.decoder), ids, PlainPlanner(), Limits(4))
    began = perf_counter()
    done = generate(Session(engine.decoder), ids, PlainPlanner(), Limits(tokens))
    return 1e3 * (perf_counter() - began - done.prefill_seconds) / (len(done.token_ids) - 1)


if __name__ == "__main__":
    run_guarded(main)
