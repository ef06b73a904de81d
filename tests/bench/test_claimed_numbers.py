"""The patterns of the claims find the numbers that tools print about contexts and clusters."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from bench.harness.contenders import Timed
from bench.harness.ledger import Row
from bench.papers.claims.conditions import NUMBERS
from bench.papers.tools import cluster_counts, context_sweep
from tests.folders import save_tiny_model

CYCLES = {
    "drafts": 2,
    "drafted": 10,
    "accepted": 8,
    "draft_tokens": 10,
    "draft_seconds": 2.0,
    "verify_seconds": 2.0,
    "skipped_attention": 6,
    "skipped_mlp": 2,
    "plan_seconds": 6.0,
    "plain_steps": 0,
    "plain_seconds": 0.0,
}


def found(name: str, printed: str) -> float:
    match = re.search(NUMBERS[name][1], printed)
    assert match is not None
    return float(match[1])


def test_a_context_shows_how_many_of_the_skipped_blocks_are_attention() -> None:
    plain, ours = (
        Timed(token_ids=[1] * 11, first_seconds=0.0, seconds=10.0, counted=10, cycles=cycles)
        for cycles in ({"drafts": 0.0}, CYCLES)
    )
    line = context_sweep.line(2048, 1.5, {"plain": plain, "knapsack": ours}, layers=10)
    assert found("attention at 2048", line) == 75
    assert "30%, 10%" in line
    assert line.split()[-3:] == ["0.80", "1.00", "2.50"], "α, speed, and speed without six seconds of search"
    assert "nothing drafted" in context_sweep.line(2048, 1.5, {"plain": plain, "knapsack": plain}, layers=10)


def test_a_sweep_prints_each_context(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "one two three four five six seven eight"}))
    options = ["--prompts", str(prompts), "--contexts", "64,256", "--max-new-tokens", "40"]
    monkeypatch.setattr(sys, "argv", ["sweep", "--model", str(save_tiny_model(tmp_path / "model")), *options])
    context_sweep.main()
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[2:]] == ["64", "256"]


def test_a_number_of_clusters_shows_its_speed() -> None:
    seconds = {("plain", "a"): 2.0, ("plain", "b"): 2.0, ("knn", "a"): 1.0, ("knn", "b"): 2.0}
    rows = [
        Row(
            prompt=category + str(i),
            category=category,
            contender=name,
            repeat=0,
            divergence="none",
            tokens=21,
            first_seconds=0.1,
            seconds=each,
            counted=20,
            cycles=CYCLES | {"plain_steps": 20, "plain_seconds": 2.0},
        )
        for (name, category), each in seconds.items()
        for i in range(2)
    ]
    line = cluster_counts.line("3", rows)
    assert found("3 clusters", line) == pytest.approx(8 / 6, abs=0.01)
    assert line.split()[-2:] == ["2.00", "1.00"]
