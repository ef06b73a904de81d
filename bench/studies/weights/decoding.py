"""Tokens/s of one request at a time by the form of the weights: fp32, bf16, and packed, each plain and `auto`.

`python -m bench.studies.weights.decoding --model demo@wheel --weights fp32,bf16,packed --prompts 13`

Every prompt is decoded in all ways in turn, without a bundle; prefills are left out. Answers differ between the forms,
so times are per token. Per form, `auto` is held against plain decoding, token by token. Intervals are over prompts.
"""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict

import torch

from bench.fixtures.prompts.prompt_files import SPEC_BENCH, stratified
from bench.harness.provenance import commit
from ssd_profiles.intervals import speedup, speedup_interval
from ssd_runtime import Engine
from ssd_runtime.command import run_guarded
from ssd_runtime.engine.loop import generate
from ssd_runtime.engine.offline.divergence import Kind, compare
from ssd_runtime.engine.sequence.output import Limits
from ssd_runtime.engine.sequence.session import Session
from ssd_runtime.loading.models import conversation

STRATEGIES = ("plain", "auto")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="demo@wheel")
    parser.add_argument("--weights", default="fp32,bf16,packed")
    parser.add_argument("--prompts", type=int, default=13)
    parser.add_argument("--new-tokens", type=int, default=48)
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    engines = {name: opened(arguments.model, name) for name in arguments.weights.split(",")}
    planners = {
        (name, strategy): engine.planners(strategy) for name, engine in engines.items() for strategy in STRATEGIES
    }
    taken = defaultdict[tuple[str, str], list[float]](list)
    kinds = defaultdict[str, Counter[Kind]](Counter)
    for number, prompt in enumerate([None, *stratified(SPEC_BENCH, arguments.prompts)]):
        for name, engine in engines.items() if number % 2 else reversed(engines.items()):
            ids = engine.loaded.encode([("user", "Hi there")] if prompt is None else conversation(prompt))
            limits = Limits(arguments.new_tokens if prompt is not None else 8, engine.loaded.eos_ids)
            answers = {
                strategy: generate(Session(engine.decoder), ids, planners[name, strategy](), limits)
                for strategy in (STRATEGIES if number % 2 else STRATEGIES[::-1])
            }
            if prompt is None:  # a warm-up
                continue
            for strategy, answer in answers.items():
                taken[name, strategy].append(answer.decode_seconds / len(answer.token_ids))
            plain, other = (answers[strategy].token_ids for strategy in STRATEGIES)
            kinds[name][compare(Session(engine.decoder), ids, plain, other).kind] += 1
    print(f"commit {commit()}; {arguments.prompts} prompts, {arguments.new_tokens} new tokens")
    for name, engine in engines.items():
        print(f"{name}: {engine.decoder.kernels}; auto against plain: {_counts(kinds[name])}")
        for strategy in STRATEGIES:
            seconds = taken[name, strategy]
            against = [
                _against(taken[base, strategy], seconds, f"{base} {strategy}") for base in engines if base != name
            ]
            if strategy != STRATEGIES[0]:
                against.append(_against(taken[name, STRATEGIES[0]], seconds, f"{name} {STRATEGIES[0]}"))
            print(f"  {strategy:6} {len(seconds) / sum(seconds):6.1f} tokens/s; {'; '.join(against)}")


def opened(model: str, weights: str) -> Engine:
    """An engine with weights in a dtype, or packed."""
    if weights == "packed":
        return Engine.open(model=model, weights="packed")
    return Engine.open(model=model, dtype=weights, weights="dense")


def _counts(kinds: Counter[Kind]) -> str:
    return ", ".join(f"{kinds[kind]} {kind}" for kind in Kind)


def _against(base: list[float], seconds: list[float], name: str) -> str:
    low, high = speedup_interval(base, seconds) or (0.0, 0.0)
    return f"{speedup(base, seconds):.3f} of {name} ({low:.3f}–{high:.3f})"


if __name__ == "__main__":
    run_guarded(main)
