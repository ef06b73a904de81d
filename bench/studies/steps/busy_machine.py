"""Times plain decoding beside busy processes, by number of threads and by how long torch's threads spin.

`python -m bench.studies.steps.busy_machine --model demo@wheel --busy 0,1 --spins default,30000 --threads 2,1`
`python -m bench.studies.steps.busy_machine --model FILE.gguf --weights packed --busy 0,1 --before CHECKOUT`

An operation on several threads ends when its last thread does. Where another process holds a processor, the others
wait, and GNU's OpenMP lets them spin meanwhile, up to GOMP_SPINCOUNT times. Every figure is a process of its own,
because the variable is read at start; settings take turns. `--busy 0` is the quiet machine. With `--before`, another
checkout of this project takes its turns too, and so does `llama-bench` with a `.gguf` file, if it is installed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
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
PACKAGES = ("profiles", "artifacts", "runtime", "compiler")
HERE = Path(__file__).parents[3]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="demo@wheel")
    parser.add_argument("--weights", choices=("packed", "dense"), help="as in ssd-run")
    parser.add_argument("--busy", default="0,1", help="processes that multiply matrices on one thread each")
    parser.add_argument("--spins", default=DEFAULT, help="values of GOMP_SPINCOUNT, comma-separated")
    parser.add_argument("--threads", default="2,1")
    parser.add_argument("--before", type=Path, help="another checkout of this project")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=24)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(milliseconds_per_token(arguments.model, arguments.weights, arguments.max_new_tokens))
        return
    checkouts = {"ours": HERE} | ({} if arguments.before is None else {"before": arguments.before})
    llama = shutil.which("llama-bench") if arguments.model.endswith(".gguf") else None
    found = defaultdict[tuple[str, str, str, str], list[float]](list)
    for _ in range(arguments.rounds):
        for busy, threads in product(arguments.busy.split(","), arguments.threads.split(",")):
            with busy_processes(int(busy)):
                for spins, (name, checkout) in product(arguments.spins.split(","), checkouts.items()):
                    found[name, threads, spins, busy].append(ours(arguments, checkout, threads, spins))
                if llama is not None:
                    found["llama.cpp", threads, DEFAULT, busy].append(llama_cpp(llama, arguments, threads))
    print(f"{os.cpu_count()} processors; ms per token, medians of processes")
    for (name, threads, spins, busy), values in sorted(found.items()):
        shown = f"{median(values):6.1f} ({min(values):.1f} to {max(values):.1f})"
        print(f"{name:>9}, threads {threads}, GOMP_SPINCOUNT {spins:>8}, {busy} busy: {shown}")


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Run so many busy processes meanwhile."""
    others = [subprocess.Popen([sys.executable, "-c", WORK]) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def ours(arguments: argparse.Namespace, checkout: Path, threads: str, spins: str) -> float:
    """Milliseconds per token of a process with the packages of a checkout."""
    path = os.pathsep.join(str(checkout.resolve() / package) for package in PACKAGES)
    given = {"OMP_NUM_THREADS": threads, "PYTHONPATH": path} | ({} if spins == DEFAULT else {"GOMP_SPINCOUNT": spins})
    options = ["--model", arguments.model, "--max-new-tokens", str(arguments.max_new_tokens)]
    options += [] if arguments.weights is None else ["--weights", arguments.weights]
    command = [sys.executable, str(Path(__file__).resolve()), "--one", *options]
    return float(subprocess.run(command, env=os.environ | given, capture_output=True, text=True, check=True).stdout)


def llama_cpp(program: str, arguments: argparse.Namespace, threads: str) -> float:
    """Milliseconds per token of llama.cpp."""
    command = [program, "-m", arguments.model, "-t", threads, "-p", "0", "-n", str(arguments.max_new_tokens)]
    done = subprocess.run([*command, "-r", "1", "-o", "json"], capture_output=True, text=True, check=True)
    return 1e3 / float(json.loads(done.stdout)[0]["avg_ts"])


def milliseconds_per_token(model: str, weights: str | None, tokens: int) -> float:
    """Milliseconds of a plain step, the prefill left out."""
    engine = Engine.open(model=model, weights=weights)
    ids = engine.loaded.encode([("user", "Tell me a story about a fox.")])
    generate(Session(engine.decoder), ids, PlainPlanner(), Limits(4))
    began = perf_counter()
    done = generate(Session(engine.decoder), ids, PlainPlanner(), Limits(tokens))
    return 1e3 * (perf_counter() - began - done.prefill_seconds) / (len(done.token_ids) - 1)


if __name__ == "__main__":
    run_guarded(main)
