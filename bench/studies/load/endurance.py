"""Memory and speed of one process that serves request after request.

`python -m bench.studies.load.endurance --requests 2000`
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from time import perf_counter

import psutil

from bench.fixtures.prompts.prompt_files import SPEC_BENCH
from bench.harness.provenance import commit
from ssd_profiles.prompts import read_prompts
from ssd_runtime import Engine, RunSettings
from ssd_runtime.command import run_guarded


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="demo@wheel")
    parser.add_argument("--prompts", type=Path, default=SPEC_BENCH)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--strategy", default="auto")
    arguments = parser.parse_args()
    engine = Engine.open(model=arguments.model)
    engine.max_sequences = arguments.at_once
    settings = RunSettings(arguments.strategy, max_new_tokens=arguments.new_tokens)
    texts = [prompt.turns[0][:400] for prompt in read_prompts(arguments.prompts)]
    chance = random.Random(0)
    print(f"commit {commit()}; {arguments.at_once} at once, {arguments.new_tokens} new tokens each")
    block = arguments.requests // 8
    process = psutil.Process()
    for number in range(8):
        began = perf_counter()
        # A number before the text, so that no prompt begins like an earlier one.
        prompts = [f"{chance.randrange(10**9)}. {chance.choice(texts)}" for _ in range(block)]
        outcomes = engine.generate(prompts, settings)
        seconds = perf_counter() - began
        tokens = sum(len(outcome.generation.token_ids) for outcome in outcomes)
        held = process.memory_info().rss / 2**20
        print(f"{(number + 1) * block} requests: {tokens / seconds:.1f} tokens/s, {held:.0f} MiB resident", flush=True)


if __name__ == "__main__":
    run_guarded(main)
