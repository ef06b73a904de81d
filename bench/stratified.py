"""A fixed sample of a prompt file, spread evenly over its categories."""

from __future__ import annotations

from collections import defaultdict
from itertools import zip_longest
from pathlib import Path

from ssd_profiles.prompts import Prompt, read_prompts


def stratified(path: Path, count: int) -> list[Prompt]:
    """`count` prompts: the first of each category in turn, then the second of each, and so on."""
    groups: dict[str, list[Prompt]] = defaultdict(list)
    for prompt in read_prompts(path):
        groups[prompt.category or ""].append(prompt)
    rounds = (prompt for row in zip_longest(*groups.values()) for prompt in row if prompt is not None)
    return [prompt for prompt, _ in zip(rounds, range(count), strict=False)]
