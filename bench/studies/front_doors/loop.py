"""The product's loop under load: traffic is recorded, a compile learns from it, the server takes the bundle up.

`python -m bench.studies.front_doors.loop --model demo@wheel --pairs pairs.jsonl --out build/loop`

`ssd-serve --bundle FOLDER --reload --record FILE` begins with a copy of the reference bundle. Clients send the pairs of
`bench.studies.front_doors.serving pairs`, each the next one as soon as its answer is complete, from the first moment to
the last. After `--seconds` of this, `ssd-compile --domain-file mine=FILE` compiles into the server's folder, on the
same two cores; the load goes on until the bundle has been taken up, and for `--seconds` more. Every answer is held
against its lone decode.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import numpy as np

from bench.harness.clients.http_client import server
from bench.harness.provenance import commit
from bench.studies.front_doors.serving import Contender, start_clients
from ssd_artifacts.bundle import Bundle
from ssd_artifacts.reference_bundle import bundle_path
from ssd_profiles.prompts import read_prompts
from ssd_runtime.command import run_guarded

COMPILE = [sys.executable, "-c", "from ssd_compiler.cli import main; main()"]
TAKEN_UP = re.compile(r'^ssd:bundle_reloads_total\{.*result="taken_up".*\} (\S+)$', re.MULTILINE)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="demo@wheel")
    parser.add_argument("--pairs", type=Path, required=True)
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--evaluations", default="8")
    parser.add_argument("--out", type=Path, default=Path("build/loop"))
    arguments = parser.parse_args()
    shutil.rmtree(arguments.out, ignore_errors=True)
    bundle, traffic = arguments.out / "bundle", arguments.out / "traffic.jsonl"
    shutil.copytree(bundle_path(Path("demo")), bundle)
    pairs = [json.loads(line) for line in arguments.pairs.read_text().splitlines()]
    print(f"commit {commit()}; {arguments.clients} clients")
    options = ["--bundle", str(bundle), "--model", arguments.model, "--reload", "--record", str(traffic)]
    with server(*options) as (address, _):
        contender = Contender("auto", address, arguments.model, "auto")
        ended = threading.Event()
        replies = list[tuple[float, dict[str, Any]]]()
        began = perf_counter()
        threads = start_clients(
            contender,
            pairs,
            arguments.clients,
            going=lambda: not ended.is_set(),
            note=lambda reply: replies.append((perf_counter(), reply)),
        )
        try:
            sleep(arguments.seconds)
            recorded = len(list(read_prompts(traffic)))
            compiling = perf_counter()
            compile_traffic(arguments, traffic, bundle)
            compiled = perf_counter()
            taken = wait_until_taken_up(address)
            sleep(arguments.seconds)
        finally:
            ended.set()
            for thread in threads:
                thread.join()
        print(f"{recorded} prompts, compiled in {compiled - compiling:.0f} s, taken up {taken - compiled:.1f} s later")
        print(f"domains of the bundle now: {', '.join(Bundle.load(bundle).domains)}")
        describe("before the compile", replies, began, compiling)
        describe("beside the compile", replies, compiling, taken)
        describe("with the new bundle", replies, taken, perf_counter())


def compile_traffic(arguments: argparse.Namespace, traffic: Path, bundle: Path) -> None:
    """Compile a bundle from recorded traffic into the server's folder."""
    asked = ["--model", arguments.model, "--domain-file", f"mine={traffic}", "--evaluations", arguments.evaluations]
    done = subprocess.run([*COMPILE, *asked, "--out", str(bundle)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)


def wait_until_taken_up(address: str) -> float:
    """The moment at which the server says that it has taken up a bundle."""
    while True:
        with urllib.request.urlopen(f"{address}/metrics", timeout=60) as response:
            found = TAKEN_UP.search(response.read().decode())
        if found and float(found[1]) >= 1.0:
            return perf_counter()
        sleep(0.5)


def describe(name: str, replies: list[tuple[float, dict[str, Any]]], begin: float, end: float) -> None:
    """Print the figures of the answers that were complete within a span of time."""
    own = [reply for at, reply in replies if begin <= at < end]
    good = [reply for reply in own if reply["complete"]]
    first = np.asarray([reply["first"] for reply in good] or [0.0])
    same = [reply["same"] for reply in good]
    print(
        f"{name} ({end - begin:.0f} s): {len(good)} of {len(own)} answers complete, {sum(same)} as alone, "
        f"{sum(reply['tokens'] for reply in good) / (end - begin):.1f} tokens/s, first token "
        f"{np.percentile(first, 50):.2f} / {np.percentile(first, 99):.2f} s (p50 / p99)"
    )


if __name__ == "__main__":
    run_guarded(main)
