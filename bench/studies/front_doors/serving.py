"""`ssd-serve` under closed-loop load: latencies and tokens/s by strategy, every answer held against its lone decode.

`python -m bench.studies.front_doors.serving pairs --out pairs.jsonl`
`python -m bench.studies.front_doors.serving load --pairs pairs.jsonl --clients 4 --seconds 40`

`pairs` decodes 100 distinct (prompt, settings) pairs plainly and alone, once. `load` lets clients send them, each the
next one as soon as its answer is complete. Strategies take turns in slices of `--seconds`; a slice has an API key of
its own and begins with the first pair, so nothing is known from an earlier slice. `--url` measures a server that runs
already, by one strategy and without our extension fields. Time per token is (last - first) ÷ (tokens - 1).
"""

from __future__ import annotations

import argparse
import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from bench.fixtures.prompt_files import SPEC_BENCH, stratified
from bench.harness.http_client import Reply, ask, server
from bench.harness.provenance import Watch, commit, disturbance
from ssd_runtime.command import run_guarded

AS_SERVED = "as served"
"""The one strategy of a server that is not ours."""


@dataclass(slots=True)
class Slice:
    """The answers of one strategy, and the seconds in which they came."""

    strategy: str
    key: str | None = None
    replies: list[tuple[int, Reply]] = field(default_factory=list)
    seconds: float = 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(required=True)
    pairs = commands.add_parser("pairs")
    pairs.add_argument("--model", default="demo")
    pairs.add_argument("--prompts", type=Path, default=SPEC_BENCH)
    pairs.add_argument("--number", type=int, default=100)
    pairs.add_argument("--new-tokens", type=int, default=64)
    pairs.add_argument("--out", type=Path, required=True)
    pairs.set_defaults(run=write_pairs)
    load = commands.add_parser("load")
    load.add_argument("--artifact", "--bundle")
    load.add_argument("--model", default="demo")
    load.add_argument("--url", help="a server that runs already, with the name of its model as --model")
    load.add_argument("--pairs", type=Path, required=True)
    load.add_argument("--strategies", default="auto,plain")
    load.add_argument("--clients", type=int, default=4)
    load.add_argument("--seconds", type=float, default=40.0)
    load.add_argument("--rounds", type=int, default=1)
    load.add_argument("--greedy", action="store_true", help="send the greedy pairs alone")
    load.add_argument("--max-concurrency", type=int, default=16)
    load.set_defaults(run=measure)
    arguments = parser.parse_args()
    arguments.run(arguments)


def write_pairs(arguments: argparse.Namespace) -> None:
    """Decode the pairs alone, plainly: two in five are sampled, each with a seed of its own."""
    from ssd_runtime import Engine, RunSettings, SamplingParams

    engine = Engine.open(model=arguments.model)
    with arguments.out.open("w") as file:
        for number, prompt in enumerate(stratified(arguments.prompts, arguments.number)):
            sampled = number % 5 in (1, 3)
            body: dict[str, Any] = {
                "messages": [{"role": "user", "content": prompt.turns[0]}],
                "max_tokens": arguments.new_tokens,
                "temperature": 0.8 if sampled else 0,
                "seed": number,
            }
            sampling = SamplingParams(temperature=0.8, seed=number) if sampled else SamplingParams()
            settings = RunSettings("plain", max_new_tokens=arguments.new_tokens, sampling=sampling)
            generation = next(iter(engine.runner(settings).run(prompt))).generation
            text = engine.loaded.decode(generation.token_ids)
            file.write(json.dumps({"body": body, "token_ids": generation.token_ids, "text": text}) + "\n")


def measure(arguments: argparse.Namespace) -> None:
    """Load a server, and print a line for each strategy."""
    pairs = [json.loads(line) for line in arguments.pairs.read_text().splitlines()]
    if arguments.greedy:
        pairs = [pair for pair in pairs if not pair["body"]["temperature"]]
    source = ["--artifact", arguments.artifact] if arguments.artifact else []
    keys = [f"--api-key={number}" for number in range(arguments.rounds * len(arguments.strategies.split(",")) + 1)]
    options = [*source, *keys, "--model", arguments.model, "--max-concurrency", str(arguments.max_concurrency)]
    print(f"commit {commit()}; {arguments.clients} clients, {len(pairs)} pairs", flush=True)
    watch = Watch()
    if arguments.url:
        for pair in pairs:
            pair["body"]["model"] = arguments.model
        slices = take_turns(arguments.url, arguments, pairs, [AS_SERVED])
    else:
        with server(*options) as (address, process):
            slices = take_turns(address, arguments, pairs, arguments.strategies.split(","))
            print(f"the server holds {process.memory_info().rss / 2**20:.0f} MiB")
    for strategy in dict.fromkeys(each.strategy for each in slices):
        describe([each for each in slices if each.strategy == strategy], pairs)
    print(disturbance(watch.stolen()))


def take_turns(
    address: str, arguments: argparse.Namespace, pairs: Sequence[dict[str, Any]], strategies: Sequence[str]
) -> list[Slice]:
    """Load the server with one strategy after the other, the other way round in every second round."""
    slices = list[Slice]()
    for strategy in strategies:
        run_clients(address, Slice(strategy, key="0"), pairs[-2:], clients=1, seconds=3.0)  # a warm-up
    for turn in range(arguments.rounds):
        for strategy in strategies if turn % 2 == 0 else reversed(strategies):
            slices.append(Slice(strategy, key=str(len(slices) + 1)))
            run_clients(address, slices[-1], pairs, arguments.clients, arguments.seconds)
    return slices


def run_clients(address: str, part: Slice, pairs: Sequence[dict[str, Any]], clients: int, seconds: float) -> None:
    """Send the next pair whenever an answer is complete, for `seconds` seconds; answers under way are waited for."""
    number = count()
    began = perf_counter()
    extra: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    if part.strategy != AS_SERVED:
        extra |= {"return_token_ids": True, "ssd": {"strategy": part.strategy}}

    def client() -> None:
        while perf_counter() - began < seconds:
            place = next(number) % len(pairs)
            part.replies.append((place, ask(address, {**pairs[place]["body"], **extra}, part.key)))

    threads = [threading.Thread(target=client) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    part.seconds = perf_counter() - began


def describe(slices: Sequence[Slice], pairs: Sequence[dict[str, Any]]) -> None:
    """Print a strategy's figures, and how many answers differ from their lone decodes."""
    replies = [each for part in slices for each in part.replies]
    # Not every server ends a stream with [DONE]; a reason of the end will do for those.
    ended = [reply for _, reply in replies if reply.complete or (is_foreign(slices) and reply.finish_reason)]
    good = [reply for reply in ended if reply.error is None and reply.first is not None]
    first = np.asarray([reply.first for reply in good])
    per_token = np.asarray([1e3 * (reply.last - reply.first) / (n - 1) for reply in good if (n := reply.tokens) > 1])
    tokens = sum(reply.tokens for reply in good)
    rates = [sum(reply.tokens for _, reply in part.replies) / part.seconds for part in slices]
    differing = sum(reply.text != pairs[place]["text"] for place, reply in replies)
    print(
        f"{slices[0].strategy:10} {tokens / sum(part.seconds for part in slices):6.1f} tokens/s "
        f"(slices {', '.join(f'{rate:.1f}' for rate in rates)}), {len(good)} of {len(replies)} answers; first token "
        f"{_percentiles(first)} s, per token {_percentiles(per_token)} ms; {differing} differ from their lone decodes",
        flush=True,
    )
    for place, reply in replies:
        if reply.token_ids and reply.token_ids != pairs[place]["token_ids"]:
            same = next(i for i, (a, b) in enumerate(zip(reply.token_ids, pairs[place]["token_ids"])) if a != b)  # noqa: B905
            print(f"  pair {place} differs from token {same} on")


def is_foreign(slices: Sequence[Slice]) -> bool:
    """Whether the server is not ours."""
    return slices[0].strategy == AS_SERVED


def _percentiles(values: np.ndarray[Any, np.dtype[Any]]) -> str:
    if not values.size:
        return "-"
    return " / ".join(f"{np.percentile(values, share):.3g}" for share in (50, 99))


if __name__ == "__main__":
    run_guarded(main)
