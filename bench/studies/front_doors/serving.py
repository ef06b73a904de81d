"""`ssd-serve` under closed-loop load: latencies and tokens/s by strategy, every answer held against its lone decode.

`python -m bench.studies.front_doors.serving pairs --out pairs.jsonl`
`python -m bench.studies.front_doors.serving load --pairs pairs.jsonl --clients 1,4,16 --rounds 3 --keep load.jsonl`
`python -m bench.studies.front_doors.serving table load.jsonl`

`pairs` decodes 100 distinct (prompt, settings) pairs plainly and alone, once. `load` lets clients send them, each the
next one as soon as its answer is complete. Contenders take turns in slices of `--seconds`; a slice of ours has an API
key of its own and begins with the first pair, so nothing is known from an earlier slice. `--beside FOLDER` lets
`transformers serve` take part, with the model in FOLDER, in a process of its own; its sampled answers are its own, and
not compared. `table` joins the slices of several calls. Time per token is (last - first) ÷ (tokens - 1).
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from threading import Thread
from time import perf_counter, sleep
from typing import Any

import numpy as np

from bench.fixtures.machines.ports import unused_port
from bench.fixtures.prompts.prompt_files import SPEC_BENCH, stratified
from bench.harness.clients.http_client import Reply, ask, server
from bench.harness.provenance import Watch, commit, disturbance
from ssd_profiles.intervals import speedup, speedup_interval
from ssd_runtime.command import run_guarded

PEER = "transformers serve"


@dataclass(frozen=True, slots=True)
class Contender:
    """A server with a strategy; one without a strategy is not ours."""

    name: str
    address: str
    model: str
    strategy: str | None = None
    process: subprocess.Popen[bytes] | None = None
    """A process that is stopped while it is not its turn, since it might poll."""


@dataclass(slots=True)
class Slice:
    """The answers of one contender in one of its turns, and the seconds in which they came."""

    contender: str
    clients: int
    turn: int
    seconds: float = 0.0
    replies: list[dict[str, Any]] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(required=True)
    pairs = commands.add_parser("pairs")
    pairs.add_argument("--model", default="demo@wheel")
    pairs.add_argument("--prompts", type=Path, default=SPEC_BENCH)
    pairs.add_argument("--number", type=int, default=100)
    pairs.add_argument("--new-tokens", type=int, default=64)
    pairs.add_argument("--out", type=Path, required=True)
    pairs.set_defaults(run=write_pairs)
    load = commands.add_parser("load")
    load.add_argument("--artifact", "--bundle")
    load.add_argument("--model", default="demo@wheel")
    load.add_argument("--beside", type=Path, help="folder of the same model, for transformers serve")
    load.add_argument("--pairs", type=Path, required=True)
    load.add_argument("--strategies", default="auto,plain")
    load.add_argument("--clients", default="4", help="numbers of clients, one load after the other: 1,4,16")
    load.add_argument("--seconds", type=float, default=40.0)
    load.add_argument("--rounds", type=int, default=1)
    load.add_argument("--max-concurrency", type=int, default=16)
    load.add_argument("--keep", type=Path, help="append the slices to this file, for `table`")
    load.set_defaults(run=measure)
    table = commands.add_parser("table")
    table.add_argument("slices", type=Path, nargs="+")
    table.set_defaults(run=show)
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
    """Load the servers in turn, and print a line for each contender."""
    pairs = [json.loads(line) for line in arguments.pairs.read_text().splitlines()]
    strategies = arguments.strategies.split(",")
    source = ["--artifact", arguments.artifact] if arguments.artifact else []
    loads = [int(number) for number in arguments.clients.split(",")]
    keys = [f"--api-key={number}" for number in range(len(loads) * arguments.rounds * len(strategies) + 1)]
    options = [*source, *keys, "--model", arguments.model, "--max-concurrency", str(arguments.max_concurrency)]
    print(f"commit {commit()}; {len(pairs)} pairs", flush=True)
    watch = Watch()
    with ExitStack() as stack:
        address, process = stack.enter_context(server(*options))
        contenders = [Contender(name, address, arguments.model, name) for name in strategies]
        if arguments.beside is not None:
            contenders.append(stack.enter_context(transformers_serve(arguments.beside)))
        for contender in contenders:
            run_clients(contender, Slice(contender.name, 1, 0), pairs[-2:], seconds=3.0, key="0")  # a warm-up
        slices, numbers = list[Slice](), count(1)
        for turn in range(arguments.rounds):
            for clients in loads:
                slices += take_turns(contenders, clients, turn, arguments, pairs, numbers)
        print(f"the server holds {process.memory_info().rss / 2**20:.0f} MiB")
    describe_loads(slices)
    print(disturbance(watch.stolen()))


def take_turns(
    contenders: Sequence[Contender],
    clients: int,
    turn: int,
    arguments: argparse.Namespace,
    pairs: Sequence[dict[str, Any]],
    numbers: Iterator[int],
) -> Iterator[Slice]:
    """Load one contender after the other, the other way round in every second turn; `numbers` are unused keys."""
    for contender in contenders if turn % 2 == 0 else reversed(contenders):
        part = Slice(contender.name, clients, turn)
        run_clients(contender, part, pairs, arguments.seconds, str(next(numbers)) if contender.strategy else None)
        if arguments.keep is not None:
            with arguments.keep.open("a") as file:
                file.write(json.dumps(asdict(part)) + "\n")
        yield part


def run_clients(
    contender: Contender, part: Slice, pairs: Sequence[dict[str, Any]], seconds: float, key: str | None
) -> None:
    """Send the next pair whenever an answer is complete, for `seconds` seconds; answers under way are waited for."""
    if contender.process is not None:
        contender.process.send_signal(signal.SIGCONT)
    began = perf_counter()
    threads = start_clients(
        contender, pairs, part.clients, lambda: perf_counter() - began < seconds, part.replies.append, key
    )
    for thread in threads:
        thread.join()
    part.seconds = perf_counter() - began
    if contender.process is not None:
        contender.process.send_signal(signal.SIGSTOP)


def start_clients(
    contender: Contender,
    pairs: Sequence[dict[str, Any]],
    clients: int,
    going: Callable[[], bool],
    note: Callable[[dict[str, Any]], object],
    key: str | None = None,
) -> list[Thread]:
    """Start clients that share a queue of the pairs, again and again, as long as `going` says so.

    `note` receives every answer's figures (`judged`) when it is complete.
    """
    number = count()
    extra: dict[str, Any] = {"model": contender.model, "stream": True, "stream_options": {"include_usage": True}}
    if contender.strategy is not None:
        extra |= {"return_token_ids": True, "ssd": {"strategy": contender.strategy}}

    def client() -> None:
        while going():
            place = next(number) % len(pairs)
            reply = ask(contender.address, {**pairs[place]["body"], **extra}, key)
            note(judged(reply, contender, place, pairs[place]))

    threads = [Thread(target=client) for _ in range(clients)]
    for thread in threads:
        thread.start()
    return threads


def judged(reply: Reply, contender: Contender, place: int, pair: dict[str, Any]) -> dict[str, Any]:
    """A reply's figures, and whether it is its lone decode; None where that is not to be expected."""
    # Not every server ends a stream with [DONE]; a reason of the end will do for those.
    ours = contender.strategy is not None
    complete = reply.error is None and (reply.complete if ours else reply.finish_reason is not None)
    same: bool | None = reply.text == pair["text"] and (not ours or reply.token_ids == pair["token_ids"])
    if not ours and pair["body"]["temperature"]:
        same = None
    return {
        "pair": place,
        "complete": complete and reply.first is not None,
        "first": reply.first,
        "last": reply.last,
        "tokens": reply.tokens,
        "same": same,
    }


def show(arguments: argparse.Namespace) -> None:
    """Print the lines of the slices in files, by number of clients."""
    describe_loads([Slice(**json.loads(line)) for path in arguments.slices for line in path.read_text().splitlines()])


def describe_loads(slices: Sequence[Slice]) -> None:
    """Print the figures of every contender by number of clients."""
    for clients in sorted({each.clients for each in slices}):
        print(f"{clients} clients")
        describe([each for each in slices if each.clients == clients])


def describe(slices: Sequence[Slice]) -> None:
    """Print the figures of every contender, and its speed against `plain` in the same turns."""
    by_name = {name: [s for s in slices if s.contender == name] for name in dict.fromkeys(s.contender for s in slices)}
    for name, own in by_name.items():
        replies = [reply for part in own for reply in part.replies]
        good = [reply for reply in replies if reply["complete"]]
        first = np.asarray([reply["first"] for reply in good])
        per_token = np.asarray(
            [1e3 * (r["last"] - r["first"]) / (r["tokens"] - 1) for r in good if r["tokens"] > 1], float
        )
        seconds = sum(part.seconds for part in own)
        tokens = sum(reply["tokens"] for reply in good)
        compared = [reply["same"] for reply in good if reply["same"] is not None]
        print(
            f"{name:18} {tokens / seconds:6.1f} tokens/s{_against_plain(own, by_name.get('plain', []))}, "
            f"{len(own)} slices ({', '.join(f'{_rate(part):.1f}' for part in own)}) of {seconds:.0f} s in all; "
            f"first token {_percentiles(first)} s, per token {_percentiles(per_token)} ms; "
            f"{len(good)} of {len(replies)} answers, {sum(compared)} of {len(compared)} are their lone decodes"
            f"{_asked_again(own)}",
            flush=True,
        )


def _asked_again(own: Sequence[Slice]) -> str:
    """Text with the number of answers to pairs asked before in their slice, and the times per token of both kinds."""
    new, known = list[float](), list[float]()
    for part in own:
        seen = set[int]()
        for reply in part.replies:
            if reply["complete"] and reply["tokens"] > 1:
                times = known if reply["pair"] in seen else new
                times.append(1e3 * (reply["last"] - reply["first"]) / (reply["tokens"] - 1))
            seen.add(reply["pair"])
    if not known:
        return ""
    return (
        f"; {len(known)} to pairs asked before, per token {_percentiles(np.asarray(known))} ms, "
        f"the others {_percentiles(np.asarray(new))} ms"
    )


def _rate(part: Slice) -> float:
    return sum(float(reply["tokens"]) for reply in part.replies) / part.seconds


def _against_plain(own: Sequence[Slice], plain: Sequence[Slice]) -> str:
    """The speed over that of plain decoding with its interval over turns; empty for plain decoding itself."""
    turns = min(len(own), len(plain))
    if not turns or own[0].contender == "plain":
        return ""
    seconds = [1 / _rate(part) for part in plain[:turns]], [1 / _rate(part) for part in own[:turns]]
    interval = speedup_interval(*seconds)
    shown = f" ({interval[0]:.2f}–{interval[1]:.2f})" if interval is not None else ""
    return f", {speedup(*seconds):.2f}{shown} of plain"


@contextmanager
def transformers_serve(folder: Path) -> Iterator[Contender]:
    """Run `transformers serve` with continuous batching on a free port."""
    port = unused_port()
    command = [sys.executable, "-c", "from transformers.cli.transformers import main; main()", "serve", str(folder)]
    # By default it takes most of the memory for keys and values, which the other server has a share in.
    options = ["--continuous-batching", "--cb-max-memory-percent", "0.1", "--dtype", "float32", "--device", "cpu"]
    process = subprocess.Popen(
        [*command, *options, "--port", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        for _ in range(600):
            with suppress(OSError), urllib.request.urlopen(f"http://localhost:{port}/health", timeout=5):
                break
            if process.poll() is not None:
                raise RuntimeError("transformers serve did not start; pip install 'transformers[serving]'")
            sleep(0.5)
        process.send_signal(signal.SIGSTOP)
        yield Contender(PEER, f"http://localhost:{port}", str(folder), process=process)
    finally:
        process.send_signal(signal.SIGCONT)
        process.terminate()
        process.wait()


def _percentiles(values: np.ndarray[Any, np.dtype[Any]]) -> str:
    if not values.size:
        return "-"
    return " / ".join(f"{np.percentile(values, share):.3g}" for share in (50, 99))


if __name__ == "__main__":
    run_guarded(main)
