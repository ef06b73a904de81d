"""`model.generate` with self-speculation against `model.generate` without, and against the engine as `ssd-run` uses it.

`python -m bench.studies.front_doors.custom_generate --artifact demo --count 10`

Ways take turns on each prompt; a prompt is decoded once in each way, prefill included.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter

import torch

from bench.fixtures.prompts.prompt_files import SPEC_BENCH, stratified
from bench.harness.provenance import commit
from ssd_profiles.intervals import speedup, speedup_interval
from ssd_profiles.prompts import Prompt
from ssd_runtime import CustomGenerate, Engine, RunSettings
from ssd_runtime.command import run_guarded
from ssd_runtime.loading.models import conversation

Way = Callable[[Prompt], list[int]]


def ways(engine: Engine, artifact: str | None, new: int) -> dict[str, Way]:
    """The ways to decode a prompt, by name."""
    model = engine.loaded.model
    fast = CustomGenerate(artifact, tokenizer=engine.loaded.tokenizer)
    plainly = CustomGenerate(strategy="plain")
    runner = engine.runner(RunSettings(max_new_tokens=new))

    def generate(custom: CustomGenerate | None) -> Way:
        def decode(prompt: Prompt) -> list[int]:
            ids = torch.tensor([engine.loaded.encode(conversation(prompt))])
            mask = torch.ones_like(ids)
            out = model.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False, custom_generate=custom)
            return [int(token) for token in out[0, ids.shape[1] :]]

        return decode

    return {
        "generate": generate(None),
        "generate, plain in the engine": generate(plainly),
        "generate, auto": generate(fast),
        "ssd-run's engine, auto": lambda prompt: next(runner.run(prompt)).generation.token_ids,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--artifact", "--bundle", default="demo")
    parser.add_argument("--prompts", type=Path, default=SPEC_BENCH)
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--new-tokens", type=int, default=48)
    arguments = parser.parse_args()
    engine = Engine.open(arguments.artifact)
    by_name = ways(engine, arguments.artifact, arguments.new_tokens)
    warm, *prompts = stratified(arguments.prompts, arguments.count + 1)
    for way in by_name.values():
        way(warm)
    taken, tokens, same = defaultdict[str, list[float]](list), 0, defaultdict[str, int](int)
    names = list(by_name)
    for number, prompt in enumerate(prompts):
        answers = {}
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            began = perf_counter()
            answers[name] = by_name[name](prompt)
            taken[name].append(perf_counter() - began)
        tokens += len(answers["generate"])
        for name in names:
            same[name] += answers[name] == answers["generate"]
    print(f"commit {commit()}; {len(prompts)} prompts, {tokens} tokens, {torch.get_num_threads()} threads")
    for name in names:
        shown = [f"{name:30} {tokens / sum(taken[name]):5.1f} tokens/s, {same[name]} of {len(prompts)} answers equal"]
        for base in ("generate", "ssd-run's engine, auto"):
            interval = speedup_interval(taken[base], taken[name])
            if name != base and interval is not None:
                ratio = speedup(taken[base], taken[name])
                middle = median(a / b for a, b in zip(taken[base], taken[name], strict=True))
                shown.append(
                    f"{ratio:.2f}x ({interval[0]:.2f}–{interval[1]:.2f}) of {base}, of the median prompt {middle:.2f}x"
                )
        print("; ".join(shown), flush=True)


if __name__ == "__main__":
    run_guarded(main)
