"""Replicas under load: throughput and waits, the router's price per token, and what a client sees of a killed replica.

    python -m bench.studies.scale.replicas --model demo@wheel \
        --prompts build/prompts/spec_bench/dev.jsonl --out build/replicas.json

Every server decodes plainly with one thread per replica, so that two replicas have two cores and one has one. The
loads are closed: so many clients, each with one stream open at a time.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from bench.harness.clients.http_client import Reply, ask, server
from ssd_profiles.prompts import read_prompts

MOST_CHARACTERS = 600
"""Longer prompts are left out: their prefills would hide what streams take."""


def load(address: str, prompts: Sequence[str], tokens: int, clients: int) -> tuple[list[Reply], float]:
    """Stream an answer to every prompt, `clients` at a time; returns the replies in order, and the wall seconds."""
    began = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        replies = list(pool.map(lambda prompt: ask(address, body_of(prompt, tokens)), prompts))
    return replies, time.perf_counter() - began


def body_of(prompt: str, tokens: int) -> dict[str, Any]:
    """A greedy stream with token ids."""
    return {
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0.0,
        "max_tokens": tokens,
        "stream": True,
        "return_token_ids": True,
    }


def figures(replies: Sequence[Reply], seconds: float, expected: Sequence[list[int]]) -> dict[str, Any]:
    """Throughput, waits and faults of a load."""
    firsts = [reply.first or 0.0 for reply in replies]
    whole = [reply.last or 0.0 for reply in replies]
    return {
        "throughput": round(sum(reply.tokens for reply in replies) / seconds, 2),
        "first_token_p50": round(statistics.median(firsts), 3),
        "first_token_p99": round(percentile(firsts, 0.99), 3),
        "whole_p50": round(statistics.median(whole), 3),
        "whole_p99": round(percentile(whole, 0.99), 3),
        "token_ms": round(1000 * statistics.median(per_token(reply) for reply in replies), 3),
        "lost": sum(not reply.complete or reply.error is not None for reply in replies),
        "identical": [reply.token_ids for reply in replies] == list(expected),
    }


def per_token(reply: Reply) -> float:
    """Seconds per token after the first."""
    return ((reply.last or 0.0) - (reply.first or 0.0)) / max(1, reply.tokens - 1)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that so large a share of all does not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def cpu_seconds(process: psutil.Process) -> dict[str, float]:
    """Seconds of processor time of Ray Serve's proxy and of our router."""
    names = {"ProxyActor": "proxy", "ServeReplica:ssd:router": "router"}
    found = dict[str, float]()
    for each in process.children(recursive=True):
        for part, name in names.items():
            if part in each.name():
                found[name] = each.cpu_times().user + each.cpu_times().system
    return found


def kill_later(process: psutil.Process, seconds: float) -> threading.Timer:
    """Kill one replica of a server after so many seconds."""

    def kill() -> None:
        replicas = [each for each in process.children(recursive=True) if "ServeReplica:ssd:replica" in each.name()]
        os.kill(replicas[0].pid, signal.SIGKILL)

    timer = threading.Timer(seconds, kill)
    timer.start()
    return timer


def counter(address: str, name: str) -> float:
    """A counter of the router."""
    connection = HTTPConnection(urlsplit(address).netloc, timeout=60)
    connection.request("GET", "/metrics")
    lines = connection.getresponse().read().decode().splitlines()
    return float(next(line.split()[-1] for line in lines if line.startswith(f"{name}_total")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--servers", default="one process,1 replica,2 replicas", help="Which of these to measure.")
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    every = [prompt.turns[0] if prompt.turns else prompt.messages[0][1] for prompt in read_prompts(asked.prompts)]
    every = [prompt for prompt in every if len(prompt) < MOST_CHARACTERS]
    prompts = every[:: max(1, len(every) // asked.requests)][: asked.requests]
    common = ["--model", asked.model, "--strategy", "plain", "--device", "cpu", "--threads", "1"]
    common += ["--max-concurrency", str(asked.clients)]
    found: dict[str, Any] = {}
    expected: list[list[int]] = []
    for name in asked.servers.split(","):
        options = [] if name == "one process" else ["--replicas", name[0]]
        with server(*common, *options) as (address, process):
            ask(address, body_of(prompts[0], 4))
            alone, seconds = load(address, prompts[:3], asked.tokens, 1)
            expected_alone = [reply.token_ids for reply in alone]
            lone = figures(alone, seconds, expected_alone)
            before = cpu_seconds(process)
            replies, seconds = load(address, prompts, asked.tokens, asked.clients)
            after = cpu_seconds(process)
            expected = expected or [reply.token_ids for reply in replies]
            found[name] = {"lone": lone, "load": figures(replies, seconds, expected)}
            tokens = sum(reply.tokens for reply in replies)
            found[name]["cpu_ms_per_token"] = {
                part: round(1000 * (after[part] - before[part]) / tokens, 4) for part in after
            }
            if name == "2 replicas":
                timer = kill_later(process, seconds / 3)
                replies, seconds = load(address, prompts, asked.tokens, asked.clients)
                timer.join()
                found["2 replicas, one killed"] = {
                    "load": figures(replies, seconds, expected),
                    "resumed": counter(address, "ssd:router_streams_resumed"),
                    "broken": counter(address, "ssd:router_streams_broken"),
                }
        print(json.dumps({name: found[name]}), flush=True)
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(json.dumps(found, indent=1))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
