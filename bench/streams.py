"""A stream of prompts that moves from domain to domain with a mix ratio (KNN-SSD eq. 8).

`python -m bench.streams --pool gsm8k=../shared/data/gsm8k/test.jsonl --pool … --mix-ratio 0.3 --out stream.jsonl`
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from ssd_profiles.formulas import switch_probability
from ssd_profiles.prompts import Prompt, read_prompts, read_records
from ssd_runtime.command import run_guarded


def mixed_stream(pools: Mapping[str, Sequence[Prompt]], mix_ratio: float, seed: int = 0) -> list[Prompt]:
    """Every prompt of the pools once, each with its pool as domain.

    The next prompt is of another domain with probability `mix_ratio`, all others alike. A ratio of 0 goes domain by
    domain; an empty pool is left, and counts no more. Equal pools make equal sets of prompts at every ratio.
    """
    draws, left = random.Random(seed), {name: list(prompts) for name, prompts in pools.items() if prompts}
    stream: list[Prompt] = []
    current = next(iter(left), "")
    while left:
        if current not in left:
            current = draws.choice(list(left))
        elif len(left) > 1 and stream:
            chances = [switch_probability(mix_ratio, len(left), name == current) for name in left]
            current = draws.choices(list(left), chances)[0]
        stream.append(replace(left[current].pop(0), domain=current, category=current))
        if not left[current]:
            del left[current]
    return stream


def read_pool(path: Path) -> list[Prompt]:
    """The prompts of a file that ssd-run reads, or the questions of one like GSM8K's."""
    questions = [(number, record.get("question")) for number, record in read_records(path)]
    if all(isinstance(question, str) for _, question in questions):
        return [Prompt(str(number), turns=(str(question),)) for number, question in questions]
    return read_prompts(path)


def write_stream(stream: Sequence[Prompt], path: Path) -> None:
    """One JSON object a prompt, as ssd-run reads them."""
    lines = [
        json.dumps(
            {"id": f"{place}-{prompt.id}", "turns": prompt.turns, "domain": prompt.domain, "category": prompt.category}
        )
        for place, prompt in enumerate(stream)
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pool", action="append", required=True, help="NAME=prompts.jsonl")
    parser.add_argument("--mix-ratio", type=float, default=0.3)
    parser.add_argument("--count", type=int, default=40, help="prompts of each pool")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    named = dict(text.split("=", 1) for text in arguments.pool)
    pools = {name: read_pool(Path(path))[: arguments.count] for name, path in named.items()}
    stream = mixed_stream(pools, arguments.mix_ratio, arguments.seed)
    write_stream(stream, arguments.out)
    switches = sum(a.domain != b.domain for a, b in pairwise(stream))
    print(f"{arguments.out}: {len(stream)} prompts, {switches} changes of domain")


if __name__ == "__main__":
    run_guarded(main)
