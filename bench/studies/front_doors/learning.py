"""The product's loop under load: traffic is recorded, a bundle is compiled from it, and the server takes that up.

`python -m bench.studies.front_doors.learning --model demo --artifact demo --pairs pairs.jsonl --folder build/learning`

Clients send the pairs of `bench.studies.front_doors.serving pairs` all the while, one after the other; every answer is
held against its lone decode. The recorded prompts become the domain `mine` of a copy of the bundle. `--compile`
options follow the command that compiles, such as `--evaluations 8`.
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
from collections import Counter
from itertools import count
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from bench.harness.http_client import ask, server
from bench.harness.provenance import commit
from ssd_artifacts.sharing.opening import open_given
from ssd_profiles.errors import UserError
from ssd_profiles.prompts import read_prompts
from ssd_runtime.command import run_guarded

COMPILE = [sys.executable, "-c", "from ssd_compiler.cli import main; main()"]
TAKEN_UP = re.compile(r'^ssd:bundle_reloads_total\{.*result="taken_up".*\} (\S+)$', re.MULTILINE)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--artifact", "--bundle", default="demo")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--pairs", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="a folder for the bundle and the traffic")
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--record", type=int, default=60, help="requests to record before the compile begins")
    parser.add_argument("--after", type=int, default=60, help="answers to wait for once the bundle is taken up")
    parser.add_argument("--compile", default="--evaluations 16", help="options of ssd-compile, in one string")
    arguments = parser.parse_args()
    pairs = [json.loads(line) for line in arguments.pairs.read_text().splitlines()]
    arguments.folder.mkdir(parents=True, exist_ok=True)
    bundle, traffic = arguments.folder / "bundle", arguments.folder / "traffic.jsonl"
    opened = open_given(arguments.artifact)
    if opened is None or bundle.exists() or traffic.exists():
        raise UserError(f"--folder: {arguments.folder} has a bundle or traffic already; give an empty one")
    shutil.copytree(opened.folder, bundle)
    options = ["--artifact", str(bundle), "--model", arguments.model, "--reload", "--record", str(traffic)]
    print(f"commit {commit()}; {arguments.clients} clients, {len(pairs)} pairs", flush=True)
    with server(*options) as (address, _):
        load = Load(address, pairs)
        clients = [threading.Thread(target=load.run) for _ in range(arguments.clients)]
        for client in clients:
            client.start()
        try:
            load.wait(arguments.record)
            load.phase = "while it compiled"
            learned = arguments.folder / "learned.jsonl"
            shutil.copy(traffic, learned)
            print(f"{len(list(read_prompts(learned)))} prompts recorded", flush=True)
            compile_bundle(arguments, bundle, learned)
            while not taken_up(address):
                sleep(0.2)
            load.phase = "with the new bundle"
            load.wait(arguments.after)
        finally:
            load.done.set()
            for client in clients:
                client.join()
    for (phase, outcome), number in sorted(load.found.items()):
        print(f"{phase}: {number} {outcome}")


def compile_bundle(arguments: argparse.Namespace, bundle: Path, learned: Path) -> None:
    """Add the domain `mine` to the bundle that is served."""
    command = [*COMPILE, "--from", str(bundle), "--model", arguments.model, "--domain-file", f"mine={learned}"]
    began = monotonic()
    done = subprocess.run([*command, "--out", str(bundle), *arguments.compile.split()], check=False)
    if done.returncode:
        raise UserError("ssd-compile failed; its own message says why")
    print(f"compiled in {monotonic() - began:.0f} s", flush=True)


def taken_up(address: str) -> bool:
    """Whether the server has taken up a bundle."""
    with urllib.request.urlopen(f"{address}/metrics") as response:
        found = TAKEN_UP.search(response.read().decode())
    return found is not None and float(found[1]) > 0


class Load:
    """Clients that send pairs one after the other, and what came of them by phase."""

    def __init__(self, address: str, pairs: list[dict[str, Any]]) -> None:
        self.phase = "before"
        self.found: Counter[tuple[str, str]] = Counter()
        self.done = threading.Event()
        self._address = address
        self._pairs = pairs
        self._numbers = count()
        self._lock = threading.Lock()

    def run(self) -> None:
        """Send the next pair until the end."""
        extra = {"stream": True, "return_token_ids": True}
        while not self.done.is_set():
            pair = self._pairs[next(self._numbers) % len(self._pairs)]
            reply = ask(self._address, {**pair["body"], **extra})
            if not reply.complete or reply.error is not None:
                outcome = f"LOST ({reply.status} {reply.error})"
            else:
                outcome = "identical" if reply.token_ids == pair["token_ids"] else "DIFFER"
            with self._lock:
                self.found[self.phase, outcome] += 1

    def wait(self, answers: int) -> None:
        """Wait for so many answers in this phase."""
        while sum(number for (phase, _), number in self.found.items() if phase == self.phase) < answers:
            sleep(0.1)


if __name__ == "__main__":
    run_guarded(main)
