"""A stream that gives speculation little to go by: random text, shuffled words, languages by turns.

`python -m bench.adversarial --out build/traces/adversarial.jsonl`, then `bench.compare --prompts` with it.
"""

from __future__ import annotations

import argparse
import random
import string
from pathlib import Path

from bench.prompt_files import SPEC_BENCH
from bench.stratified import stratified
from bench.streams import write_stream
from ssd_profiles.domain import starter_set
from ssd_profiles.prompts import Prompt
from ssd_runtime.command import run_guarded


def adversarial(source: Path, count: int, seed: int = 0) -> list[Prompt]:
    """`count` prompts of each of the three kinds, by turns, so that what one teaches is wrong for the next.

    `source` is a prompt file whose words are shuffled.
    """
    draws = random.Random(seed)
    pairs = starter_set("wmt16").records
    stream = list[Prompt]()
    for number, prompt in enumerate(stratified(source, count)):
        words = " ".join(prompt.turns).split()
        draws.shuffle(words)
        letters = ("".join(draws.choices(string.ascii_lowercase, k=draws.randint(2, 9))) for _ in range(60))
        chosen = draws.sample(pairs, 4)
        sentences = " ".join(pair["german" if turn % 2 else "english"] for turn, pair in enumerate(chosen))
        by_kind = {
            "random text": f"Go on with this text: {' '.join(letters)}",
            "shuffled words": " ".join(words[:150]),
            "two languages": f"{sentences} Go on, a sentence in German and a sentence in English by turns.",
        }
        stream += [Prompt(f"{kind}-{number}", turns=(text,), category=kind) for kind, text in by_kind.items()]
    return stream


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--prompts", type=Path, default=SPEC_BENCH)
    parser.add_argument("--count", type=int, default=5, help="prompts of each kind")
    parser.add_argument("--out", type=Path, default=Path("build/traces/adversarial.jsonl"))
    arguments = parser.parse_args()
    stream = adversarial(arguments.prompts, arguments.count)
    write_stream(stream, arguments.out)
    print(f"{arguments.out}: {len(stream)} prompts")


if __name__ == "__main__":
    run_guarded(main)
