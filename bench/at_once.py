"""Tokens/s of several requests at once: plain, `auto`, and what a user may have instead, on the same weights.

`python -m bench.at_once --at 4,8 --rounds 3`

Contenders take turns on the same prompts, prefill included; every round has prompts of its own, so that no prompt is
known from an earlier one. Answers have one length. Intervals are over rounds.
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from rich.console import Console

from bench.fixtures.prompts.prompt_files import SPEC_BENCH, read_pool, stratified
from bench.harness.contenders import PLAIN, about, difference, digest
from bench.harness.ledger import NAME, Ledger, Row
from bench.harness.provenance import Watch
from bench.harness.standings import standings
from bench.harness.tables import show
from ssd_profiles.errors import UserError
from ssd_profiles.prompts import Prompt
from ssd_runtime import Engine, RunSettings
from ssd_runtime.commands.command import run_guarded, uncollected
from ssd_runtime.loading.loaded_model import conversation

PEERS = ("transformers generate_batch", "transformers generate, padded")
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


def padded(engine: Engine) -> Serve:
    """Serve by `model.generate` on left-padded batches."""
    model = engine.loaded.model

    def serve(prompts: list[list[int]], new: int, at_once: int) -> list[list[int]]:
        answers = []
        for begin in range(0, len(prompts), at_once):
            batch = prompts[begin : begin + at_once]
            most = max(map(len, batch))
            ids = torch.tensor([[0] * (most - len(one)) + one for one in batch])
            seen = torch.tensor([[0] * (most - len(one)) + [1] * len(one) for one in batch])
            out = model.generate(ids, attention_mask=seen, do_sample=False, max_new_tokens=new, pad_token_id=0)
            answers += out[:, most:].tolist()
        return answers

    return serve


def continuous(engine: Engine) -> Serve:
    """Serve by transformers' continuous batching."""
    model: Any = engine.loaded.model

    def serve(prompts: list[list[int]], new: int, at_once: int) -> list[list[int]]:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        config = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
        # Its own choice of memory, 60% of the machine's, has to be written to first.
        batching = ContinuousBatchingConfig(max_memory_percent=0.1, max_requests_per_batch=at_once)
        results = model.generate_batch(
            inputs=prompts, generation_config=config, continuous_batching_config=batching, warmup=False
        )
        return [results[name].generated_tokens for name in sorted(results, key=lambda name: int(name.split("_")[-1]))]

    return serve


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="demo@wheel")
    parser.add_argument("--prompts", type=Path, default=SPEC_BENCH)
    parser.add_argument("--at", default="4,8")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("build/at-once"), help="folder of rows; a killed run resumes")
    arguments = parser.parse_args()
    with uncollected():  # As commands do.
        engine = Engine.open(model=arguments.model)
    # No token ends an answer, so that all have one length.
    engine.loaded.model.generation_config.eos_token_id = -1
    loads = [int(each) for each in arguments.at.split(",")]
    pool = read_pool(arguments.prompts)
    shares = list(batches(stratified(arguments.prompts, len(pool)), loads, arguments.rounds))
    engine.max_sequences = max(loads)
    ways = working(engine)
    settings = {
        **about(engine),
        "prompts": [arguments.prompts.name, 2 * max(loads), digest(pool)],
        "at": loads,
        "max_new_tokens": arguments.max_new_tokens,
        "contenders": list(ways),
    }
    ledger = Ledger(arguments.out / NAME, settings)
    for number, at_once, prompts in shares:
        name = f"{at_once} at once, round {number + 1}"
        if not ledger.has(name, 0):
            ids = [engine.loaded.encode(conversation(each)) for each in prompts]
            measure(ledger, engine, ways, ids, (name, at_once, number), arguments.max_new_tokens)
    show(standings(ledger.rows, [PLAIN, *PEERS]), PLAIN, [PLAIN, *PEERS], Console(highlight=False, width=160))


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


def working(engine: Engine) -> dict[str, Serve]:
    """The contenders that serve a first small batch; why another one does not is printed."""
    makers: dict[str, Callable[[], Serve]] = {
        PLAIN: lambda: ours(engine, PLAIN),
        "auto": lambda: ours(engine, "auto"),
        "transformers generate, padded": lambda: padded(engine),
        "transformers generate_batch": lambda: continuous(engine),
    }
    ways = dict[str, Serve]()
    for name, make in makers.items():
        try:
            ways[name] = make()
            ways[name]([[1, 2, 3], [4, 5]], 4, 2)
        except Exception as error:  # whatever a peer fails with is its result
            ways.pop(name, None)
            print(f"{name}: not run ({type(error).__name__}: {str(error)[:200]})", flush=True)
    return ways


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
        began = perf_counter()
        answers[name] = ways[name](prompts, new, at_once)
        seconds[name] = perf_counter() - began
    stolen = watch.stolen()
    ledger.add(
        [
            Row(
                prompt=label,
                category=f"{at_once} at once",
                contender=name,
                repeat=0,
                divergence=_worst(engine, prompts, answers[PLAIN], answers[name]),
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
