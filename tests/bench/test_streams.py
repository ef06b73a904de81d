"""Mixed streams of prompts."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from bench.fixtures.prompts.prompt_files import read_pool
from bench.fixtures.prompts.streams import mixed_stream, write_stream
from ssd_profiles.prompts import Prompt, read_prompts


def pools(size: int, domains: int = 3) -> dict[str, list[Prompt]]:
    return {f"d{n}": [Prompt(f"{n}-{i}", turns=(f"{n} {i}",)) for i in range(size)] for n in range(domains)}


@pytest.mark.parametrize("ratio", [0.0, 0.3, 0.7, 1.0])
def test_every_ratio_has_the_same_prompts(ratio: float) -> None:
    stream = mixed_stream(pools(20), ratio)
    assert Counter(prompt.domain for prompt in stream) == {"d0": 20, "d1": 20, "d2": 20}
    assert len({prompt.id for prompt in stream}) == 60


def test_the_ratio_is_how_often_the_domain_changes() -> None:
    assert sum(a.domain != b.domain for a, b in pairwise(mixed_stream(pools(50), 0.0))) == 2
    for ratio in (0.3, 0.7):
        # While no pool is empty.
        stream = mixed_stream(pools(2000), ratio, seed=3)[:3000]
        changes = [a.domain != b.domain for a, b in pairwise(stream)]
        assert sum(changes) / len(changes) == pytest.approx(ratio, abs=0.03)
        after = Counter(b.domain for a, b in pairwise(stream) if a.domain == "d0" and b.domain != "d0")
        assert after["d1"] / sum(after.values()) == pytest.approx(0.5, abs=0.08)
    ones = mixed_stream(pools(40, domains=2), 1.0)
    assert all(a.domain != b.domain for a, b in pairwise(ones))


def test_a_stream_is_a_prompt_file(tmp_path: Path) -> None:
    stream = mixed_stream(pools(4), 0.5)
    write_stream(stream, tmp_path / "stream.jsonl")
    assert [prompt.turns for prompt in read_prompts(tmp_path / "stream.jsonl")] == [prompt.turns for prompt in stream]
    (tmp_path / "questions.jsonl").write_text('{"question": "Why?", "answer": "So."}\n')
    assert read_pool(tmp_path / "questions.jsonl")[0].turns == ("Why?",)
