"""Tokens/s of several requests at once: ours, plain and `auto`, against llama.cpp's own server on the same file.

`python -m bench.at_once MODEL.gguf --server build/llama.cpp/bin/llama-server --at 2,4,8 --rounds 4`

Contenders take turns on the same prompts, prefills included, and begin a prompt when an answer has ended. Every round
has prompts of its own, so that no prompt is known from an earlier one. Intervals are over rounds.
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from time import perf_counter, sleep

import torch
from rich.console import Console

from bench.fixtures.prompts.prompt_files import SPEC_BENCH, read_pool, stratified
from bench.harness.contenders import PLAIN, Decode, about, difference, digest
from bench.harness.ledger import NAME, NOT_COMPARED, Ledger, Row
from bench.harness.provenance import Watch
from bench.llama_cpp import SETTLE, STRATEGIES, llama, peers, serving, tell, version
from ssd_profiles.errors import UserError
from ssd_profiles.prompts import Prompt
from ssd_runtime import Engine, RunSettings
from ssd_runtime.commands.command import run_guarded, uncollected
from ssd_runtime.loading.loaded_model import conversation

KINDS = ("none", "near_tie", "error")
"""Differences from plain decoding, the worst last."""
Serve = Callable[[list[list[int]], int, int], list[list[int]]]
"""Prompts, new tokens, requests at once → answers."""


def ours(engine: Engine, strategy: str) -> Serve:
    """Serve by the engine, which gets a new request when one has ended."""

    def serve(prompts: list[list[int]], new: int, at_once: int) -> list[list[int]]:
        settings = RunSettings(strategy, max_new_tokens=new)
        waiting, running, requests = deque(prompts), 0, []
        while waiting or running:
            while waiting and running < at_once:
                requests.append(engine.add_request(waiting.popleft(), settings, stream=strategy))
                running += 1
            running -= len(engine.step())
        return [request.outcome().generation.token_ids for request in requests]

    return serve


def theirs(server: Decode) -> Serve:
    """Serve by another server, which is asked by as many clients as there are requests at once."""

    def serve(prompts: list[list[int]], new: int, at_once: int) -> list[list[int]]:
        with ThreadPoolExecutor(at_once) as clients:
            return list(clients.map(lambda ids: server(ids, new).token_ids, prompts))

    return serve


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", help="a .gguf file, or demo@wheel")
    parser.add_argument("--server", type=Path, help="llama-server, built for this processor; ours alone without it")
    parser.add_argument("--speculations", default="ngram-mod", help="of bench.llama_cpp; or none")
    parser.add_argument("--prompts", type=Path, default=SPEC_BENCH)
    parser.add_argument("--at", default="2,4,8")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, default=Path("build/at-once"), help="folder of rows; a killed run resumes")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with uncollected():  # As commands do.
        engine = Engine.open(model=arguments.model)
    loads = [int(each) for each in arguments.at.split(",")]
    pool = read_pool(arguments.prompts)
    shares = list(batches(stratified(arguments.prompts, len(pool)), loads, arguments.rounds))
    engine.max_sequences = max(loads)
    settings = peers(arguments.speculations) if arguments.server else {}
    ledger = Ledger(
        arguments.out / NAME,
        {
            **about(engine),
            "prompts": [arguments.prompts.name, 2 * max(loads), digest(pool)],
            "at": loads,
            "max_new_tokens": arguments.max_new_tokens,
            "contenders": [*settings, *STRATEGIES],
            "server": version(arguments.server) if arguments.server else None,
        },
    )
    with ExitStack() as stack:
        ways: dict[str, Serve] = {}
        for name, setting in settings.items():
            command = llama(arguments.server, arguments.model, arguments.threads, setting)
            server = serving(command, arguments.out / f"{setting}.log", slots=max(loads))
            ways[name] = theirs(stack.enter_context(server))
        ways |= {name: ours(engine, name) for name in STRATEGIES}
        for serve in ways.values():
            serve([[1, 2, 3], [4, 5]], 4, 2)
        for number, at_once, prompts in shares:
            name = f"{at_once} at once, round {number + 1}"
            if not ledger.has(name, 0):
                ids = [engine.loaded.encode(conversation(each)) for each in prompts]
                measure(ledger, engine, ways, ids, (name, at_once, number), arguments.max_new_tokens)
    tell(ledger, list(settings), Console(highlight=False, width=160), "Speed (prefill included)")


def batches(prompts: Sequence[Prompt], loads: Sequence[int], rounds: int) -> Iterator[tuple[int, int, list[Prompt]]]:
    """Rounds, requests at once, and twice as many prompts, each prompt once. Raises UserError if these do not suffice.

    More rounds leave the prompts of earlier ones as they are.
    """
    needed = rounds * 2 * sum(loads)
    if needed > len(prompts):
        raise UserError(
            f"--prompts: {rounds} rounds of {' and '.join(map(str, loads))} at once take {needed} prompts, got "
            f"{len(prompts)}; give more, or fewer --rounds"
        )
    left = iter(prompts)
    for number in range(rounds):
        for at_once in loads:
            yield number, at_once, list(islice(left, 2 * at_once))


def measure(
    ledger: Ledger,
    engine: Engine,
    ways: dict[str, Serve],
    prompts: list[list[int]],
    load: tuple[str, int, int],
    new: int,
) -> None:
    """One round of one load: all contenders serve the same prompts, in an order that rotates from round to round."""
    label, at_once, number = load
    order = list(ways)
    shift = number % len(order)
    answers = dict[str, list[list[int]]]()
    seconds = dict[str, float]()
    watch = Watch()
    for name in order[shift:] + order[:shift]:
        sleep(SETTLE)
        began = perf_counter()
        answers[name] = ways[name](prompts, new, at_once)
        seconds[name] = perf_counter() - began
    stolen = watch.stolen()
    kinds = {name: _worst(engine, prompts, answers[PLAIN], answers[name]) for name in STRATEGIES}
    ledger.add(
        [
            Row(
                prompt=label,
                category=f"{at_once} at once",
                contender=name,
                repeat=0,
                divergence=kinds.get(name, NOT_COMPARED),
                tokens=sum(map(len, answers[name])),
                first_seconds=0.0,
                seconds=seconds[name],
                counted=sum(map(len, answers[name])),
            )
            for name in ways
        ],
        stolen,
    )


def _worst(engine: Engine, prompts: list[list[int]], plain: list[list[int]], other: list[list[int]]) -> str:
    """The worst difference of a contender's answers from plain decoding's."""
    kinds = [difference(engine, ids, one, two).value for ids, one, two in zip(prompts, plain, other, strict=True)]
    return max(kinds, key=KINDS.index)


if __name__ == "__main__":
    run_guarded(main)
