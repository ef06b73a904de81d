"""`ssd-serve` under thousands of requests, some cancelled and some malformed: nothing is lost, and memory stays.

`python -m bench.studies.front_doors.soak --model demo@wheel --pairs pairs.jsonl --requests 2000`

A fifth leave while their answer is under way or before it begins, a tenth are malformed. Every complete answer is held
against its lone decode (`bench.studies.front_doors.serving pairs`), and the server's own counts against the clients'.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import threading
import time
import urllib.request
from collections import Counter
from itertools import count
from pathlib import Path
from typing import Any

from bench.harness.clients.http_client import Reply, ask, server
from bench.harness.provenance import commit
from ssd_runtime.command import run_guarded

MALFORMED: list[Any] = [
    b"",
    b"{",
    b"\xff",
    b"[]",
    {"messages": []},
    {"messages": "x"},
    {"messages": [{"role": "user", "content": "x"}], "temperature": 9},
    {"messages": [{"role": "user", "content": "x"}], "nonsense": 1},
    {"messages": [{"role": "user", "content": "x"}], "max_tokens": -1},
    {"messages": [{"role": "user", "content": "word " * 20000}]},
    {"messages": [{"role": "user", "content": "x"}], "model": "another"},
]

COUNTS = re.compile(
    r"^((?:vllm:num_requests_\w+|vllm:request_success_total|ssd:requests_without_answer_total)\{.*?\}) (\S+)$",
    re.MULTILINE,
)
"""The server's counts of requests, among its metrics."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--artifact", "--bundle")
    parser.add_argument("--model", default="demo@wheel")
    parser.add_argument("--pairs", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--kv-memory", help="the server's, so small that it is in use before the end")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    pairs = [json.loads(line) for line in arguments.pairs.read_text().splitlines()]
    source = ["--artifact", arguments.artifact] if arguments.artifact else []
    source += ["--kv-memory", arguments.kv_memory] if arguments.kv_memory else []
    print(f"commit {commit()}; {arguments.requests} requests, {arguments.clients} clients", flush=True)
    with server(*source, "--model", arguments.model, "--max-concurrency", "8") as (address, process):
        soak = Soak(address, pairs, arguments.seed)
        block = arguments.requests // 8
        for number in range(8):
            began = time.monotonic()
            soak.run(block, arguments.clients)
            held = process.memory_info().rss / 2**20
            seconds = time.monotonic() - began
            print(f"{(number + 1) * block} requests: {held:.0f} MiB, {seconds:.1f} s, {dict(soak.found)}", flush=True)
        soak.settle()
    print(f"server: {soak.counted}")


class Soak:
    """Sends requests of all kinds, and counts what came of them."""

    def __init__(self, address: str, pairs: list[dict[str, Any]], seed: int) -> None:
        self.address = address
        self.found: Counter[str] = Counter()
        """Number of requests by what came of them."""
        self.counted: dict[str, float] = {}
        """The server's own counts."""
        self._pairs = pairs
        self._seed = seed
        self._lock = threading.Lock()
        self._numbers = count()

    def run(self, requests: int, clients: int) -> None:
        """Send requests, `clients` at a time."""
        left = iter(range(requests))

        def client() -> None:
            while True:
                with self._lock:
                    if next(left, None) is None:
                        return
                    number = next(self._numbers)
                outcome = self._one(random.Random(f"{self._seed} {number}"))
                with self._lock:
                    self.found[outcome] += 1

        threads = [threading.Thread(target=client) for _ in range(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _one(self, chance: random.Random) -> str:
        """Send one request; returns a word for what came of it."""
        kind = chance.random()
        if kind < 0.1:
            reply = ask(self.address, chance.choice(MALFORMED))
            return "refused" if 400 <= reply.status < 500 and reply.error and reply.complete else "BADLY REFUSED"
        pair = chance.choice(self._pairs)
        body = {**pair["body"], "stream": True, "return_token_ids": True, "stream_options": {"include_usage": True}}
        if chance.random() < 0.2:
            body["ssd"] = {"strategy": chance.choice(["plain", "lookup"])}
        if kind < 0.3:
            ask(self.address, body, leave_after=chance.choice([0, 1, 2, 5]))
            return "left"
        return self._judge(ask(self.address, body), pair)

    def _judge(self, reply: Reply, pair: dict[str, Any]) -> str:
        if reply.status == 429:
            return "told to come again"
        if not reply.complete or reply.error is not None:
            return f"LOST ({reply.status} {reply.error})"
        if reply.token_ids != pair["token_ids"]:
            return "DIFFERS"
        return "identical" if reply.text == pair["text"] else "TEXT DIFFERS"

    def settle(self) -> None:
        """Wait until the server is idle, and read its counts."""
        for _ in range(100):
            with urllib.request.urlopen(f"{self.address}/metrics") as response:
                text = response.read().decode()
            self.counted = {name: float(value) for name, value in COUNTS.findall(text)}
            if not sum(value for name, value in self.counted.items() if "num_requests" in name):
                return
            time.sleep(0.1)


if __name__ == "__main__":
    run_guarded(main)
