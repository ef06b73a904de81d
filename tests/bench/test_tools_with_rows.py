"""Tools of the benchmarks' page write rows as `bench.compare` does, and go on where they stopped."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench import at_once
from bench.harness.ledger import NAME, read_rows
from bench.harness.standings import against
from tests.folders import TEXTS, save_tiny_model


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": text[:40]}) for text in TEXTS[:2] * 2))
    return path


def test_requests_at_once(tmp_path: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Continuous batching takes longer to start than all the rest.
    monkeypatch.setattr(at_once, "continuous", lambda _: 1 / 0)
    folder = save_tiny_model(tmp_path / "model")
    out = tmp_path / "out"
    options = ["--model", str(folder), "--prompts", str(prompts), "--at", "1,2", "--max-new-tokens", "5"]
    for rounds in ("1", "2"):
        monkeypatch.setattr(sys, "argv", ["peers", *options, "--rounds", rounds, "--out", str(out)])
        at_once.main()
    rows = read_rows(out / NAME)
    assert {row.category for row in rows} == {"1 at once", "2 at once"}
    assert len({row.prompt for row in rows}) == 4
    assert {row.contender for row in rows} >= {"plain", "auto", "transformers generate, padded"}
    assert all(row.divergence in ("none", "near_tie") for row in rows)
    assert {row.tokens for row in rows if row.category == "2 at once"} == {4 * 5}
    assert against([row for row in rows if row.category == "1 at once"], "plain", "auto") is not None
