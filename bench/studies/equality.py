"""Token ids of several strategies against transformers' `generate`, over one prompt file.

`python -m bench.studies.equality --artifact build/demo --prompts build/prompts/spec_bench/dev.jsonl --count 40`

Strategies are auto, knn, and a fixed random mask of 40% of the sub-layers. Every difference is classified.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

from bench.fixtures.prompts.prompt_files import stratified
from ssd_profiles.mask import SkipMask
from ssd_runtime.command import run_guarded
from ssd_runtime.engine.engine import Engine
from ssd_runtime.engine.loop import decode
from ssd_runtime.engine.offline.divergence import Kind, compare
from ssd_runtime.engine.sequence.output import Limits
from ssd_runtime.engine.sequence.session import Session
from ssd_runtime.loading.models import conversation
from ssd_runtime.planning.plan import ConstantPlanner, Plan, Planner
from ssd_runtime.planning.registry import read_settings
from ssd_runtime.planning.strategy import make_strategy
from ssd_runtime.sampling.params import SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--artifact", "--bundle", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--model")
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    arguments = parser.parse_args()
    engine = Engine.open(arguments.artifact, arguments.model)
    bundle = engine.bundle
    loaded = engine.loaded
    decoder = engine.decoder
    latency = engine.latency
    layers = decoder.shape.num_layers
    sampling = SamplingParams(repetition_penalty=loaded.repetition_penalty)
    forced = SkipMask.of(layers, random.Random(0).sample(range(2 * layers), round(0.4 * 2 * layers)))
    strategies: dict[str, Callable[[], Planner]] = {
        "auto": make_strategy("auto", None, decoder, bundle, latency),
        "knn": make_strategy("knn", read_settings("knn", []), decoder, bundle, latency),
        "40% mask": lambda: ConstantPlanner(Plan.masked("forced", forced, 5)),
    }
    found: dict[str, Counter[Kind]] = {name: Counter() for name in strategies}
    drafted = Counter[str]()
    accepted = Counter[str]()
    tokens = 0
    categories = set[str]()
    for prompt in stratified(arguments.prompts, arguments.count):
        ids = loaded.encode(conversation(prompt))
        session = Session(decoder, sampling)
        with torch.no_grad():
            out = loaded.model.generate(torch.tensor([ids]), max_new_tokens=arguments.max_new_tokens, do_sample=False)
        expected = out[0, len(ids) :].tolist()
        tokens += len(expected)
        categories.add(prompt.category or "")
        for name, make in strategies.items():
            prefilled = session.prefill(ids)
            got = decode(session, prefilled, make(), Limits(arguments.max_new_tokens, loaded.eos_ids))
            difference = compare(session, ids, expected, got.token_ids)
            found[name][difference.kind] += 1
            drafted[name] += got.num_draft_tokens
            accepted[name] += got.num_accepted_tokens
            if difference.kind is not Kind.NONE:
                print(f"{prompt.id} {name}: {difference}")
    print(f"{sum(found['auto'].values())} prompts of {len(categories)} categories, {tokens} tokens by generate")
    for name, kinds in found.items():
        print(
            f"{name:9} identical {kinds[Kind.NONE]}, near tie {kinds[Kind.NEAR_TIE]}, error {kinds[Kind.ERROR]}; "
            f"{accepted[name]} of {drafted[name]} drafts accepted"
        )


if __name__ == "__main__":
    run_guarded(main)
