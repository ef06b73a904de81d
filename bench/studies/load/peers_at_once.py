"""Tokens/s of several requests at once: plain, `auto`, and what a user may have instead, on the same weights.

`python -m bench.studies.load.peers_at_once --at 4,8 --rounds 3`

Contenders take turns; every round decodes the same prompts, prefill included. Answers have one length.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from bench.fixtures.prompt_files import SPEC_BENCH, stratified
from bench.harness.provenance import commit
from ssd_profiles.intervals import speedup, speedup_interval
from ssd_runtime import Engine
from ssd_runtime.command import run_guarded
from ssd_runtime.engine.loop import Limits, generating
from ssd_runtime.engine.scheduler import Scheduler
from ssd_runtime.loading.models import conversation

Serve = Callable[[list[list[int]], int, int], list[list[int]]]
"""Prompts, new tokens, requests at once → answers."""


def ours(engine: Engine, strategy: str) -> Serve:
    """Serve by the engine."""

    def serve(prompts: list[list[int]], new: int, at_once: int) -> list[list[int]]:
        scheduler, make, jobs = Scheduler(engine.decoder, at_once), engine.planners(strategy), []
        for ids in prompts:
            session = scheduler.session()
            jobs.append(scheduler.add(session, generating(session, ids, make(), Limits(new)), ids))
        while scheduler.running or scheduler.waiting:
            scheduler.step()
        return [job.ended().token_ids for job in jobs]

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
            out = model.generate(
                ids, attention_mask=seen, do_sample=False, min_new_tokens=new, max_new_tokens=new, pad_token_id=0
            )
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


def ragged(engine: Engine) -> Serve:
    """Serve by `economize`'s ragged batches with its prompt lookup."""
    import economize  # type: ignore[import-not-found]
    from economize.techniques import lookup  # type: ignore[import-not-found]

    library = economize.apply(
        engine.loaded.model, lookup.LookupConfig(), decoding=economize.DecodeConfig(cycle_length=6)
    )

    def serve(prompts: list[list[int]], new: int, at_once: int) -> list[list[int]]:
        answers = []
        for begin in range(0, len(prompts), at_once):
            batch = [torch.tensor(ids) for ids in prompts[begin : begin + at_once]]
            answers += [one.tokens.tolist() for one in library.decode_batch(batch, new, stop=set())]
        return answers

    return serve


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--prompts", type=Path, default=SPEC_BENCH)
    parser.add_argument("--at", default="4,8")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    engine = Engine.open(model=arguments.model)
    makers: dict[str, Callable[[], Serve]] = {
        "plain": lambda: ours(engine, "plain"),
        "auto": lambda: ours(engine, "auto"),
        "generate, padded": lambda: padded(engine),
        "generate_batch": lambda: continuous(engine),
        "economize, ragged": lambda: ragged(engine),
    }
    ways = dict[str, Serve]()
    print(f"commit {commit()}; {arguments.new_tokens} new tokens")
    for name, make in makers.items():
        try:
            ways[name] = make()
            ways[name]([[1, 2, 3], [4, 5]], 4, 2)
        except Exception as error:  # whatever a peer fails with is its result
            ways.pop(name, None)
            print(f"{name}: not run ({type(error).__name__}: {str(error)[:200]})", flush=True)
    for at_once in map(int, arguments.at.split(",")):
        prompts = [engine.loaded.encode(conversation(each)) for each in stratified(arguments.prompts, 2 * at_once)]
        taken, same = defaultdict[str, list[float]](list), defaultdict[str, int](int)
        for number in range(arguments.rounds):
            order = list(ways)
            shift = number % len(order)
            answers = dict[str, list[list[int]]]()
            for name in order[shift:] + order[:shift]:
                began = perf_counter()
                answers[name] = ways[name](prompts, arguments.new_tokens, at_once)
                tokens = sum(map(len, answers[name]))
                taken[name].append((perf_counter() - began) / tokens)
            for name, given in answers.items():
                same[name] += sum(a == b for a, b in zip(given, answers["plain"], strict=True))
        for name, seconds in taken.items():
            interval = speedup_interval(seconds, taken["auto"])
            shown = f" ({interval[0]:.2f}–{interval[1]:.2f})" if interval is not None and name != "auto" else ""
            print(
                f"{at_once} at once, {name:18} {len(seconds) / sum(seconds):6.1f} tokens/s; auto is "
                f"{speedup(seconds, taken['auto']):.2f}x{shown}; {same[name]} of {len(prompts) * len(seconds)} "
                "answers as plain",
                flush=True,
            )


if __name__ == "__main__":
    run_guarded(main)
