"""The comparison: what it counts, that it goes on, that it tells a wrong output."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bench import compare
from bench.harness.contenders import Decode, Timed
from bench.harness.ledger import NOT_COMPARED, Ledger, Row
from bench.harness.peers.in_process import PEERS
from bench.harness.standings import against, standings
from bench.harness.tables import sameness
from ssd_profiles.errors import UserError
from ssd_runtime import Engine
from tests.folders import TEXTS, save_tiny_model


def row(prompt: str, contender: str, seconds: float, counted: int = 10, category: str = "a") -> Row:
    return Row(prompt, category, contender, 0, "none", counted + 1, 0.1, seconds, counted)


def test_speed_is_total_tokens_over_total_seconds_of_the_same_prompts() -> None:
    rows = [row("1", "plain", 2.0), row("2", "plain", 4.0), row("1", "fast", 1.0), row("2", "fast", 2.0)]
    slowest = {"minimum": 2.0, "share_below_1": 0.0}
    assert against(rows, "plain", "fast") == {"speedup": 2.0, **slowest}, "two prompts make no interval"
    third = [*rows, row("4", "plain", 3.0), row("4", "fast", 1.5)]
    assert against(third, "plain", "fast") == {"speedup": 2.0, "low": 2.0, "high": 2.0, **slowest}
    mixed = [*rows, row("5", "plain", 1.0), row("5", "fast", 2.0)]
    found_mixed = against(mixed, "plain", "fast") or {}
    assert found_mixed["minimum"] == 0.5
    assert found_mixed["share_below_1"] == pytest.approx(1 / 3)
    found = standings([*rows, row("3", "plain", 9.0, category="b")], ["plain"])
    assert found["fast"]["overall"]["tokens_per_second"] == 20 / 3.0
    assert found["fast"]["overall"]["against"]["plain"]["speedup"] == 2.0
    assert found["plain"]["categories"]["b"]["against"]["plain"]["speedup"] == 1.0
    assert set(found["plain"]["categories"]) == {"a", "b"}


def test_with_the_measured_verification_the_formula_accounts_for_every_second_of_drafting() -> None:
    """Chains, and trees whose accepted siblings are no draft steps."""
    plain = replace(row("1", "plain", 10.0), cycles={"plain_steps": 10, "plain_seconds": 10.0})
    for tokens in (7, 9):
        spent = {"draft_seconds": 2.0, "verify_seconds": 3.0, "skipped_attention": 0, "skipped_mlp": 0}
        cycles = {"drafts": 2, "drafted": 6, "accepted": 5, "draft_tokens": tokens, **spent}
        found = standings([plain, replace(row("1", "drafting", 5.0, counted=tokens), cycles=cycles)], ["plain"])
        assert found["drafting"]["overall"]["expected_speedup_with_verification"] == pytest.approx(tokens / 5.0)


def test_outputs_that_nobody_compared_are_not_counted_as_different() -> None:
    rows = [replace(row("1", name, 1.0), divergence=NOT_COMPARED) for name in ("plain", "drafting")]
    figures = standings(rows, ["plain"])["drafting"]["overall"]
    assert sameness(figures) == NOT_COMPARED
    assert sameness(standings([row("1", "plain", 1.0)], [])["plain"]["overall"]) == "1 of 1"


def test_what_other_guests_took_is_weighted_by_time(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "rows.jsonl", {"contenders": ["plain"]})
    ledger.add([row("0", "plain", 5.0)])
    assert ledger.stolen is None
    ledger.add([row("1", "plain", 3.0)], stolen=0.0)
    ledger.add([row("2", "plain", 1.0)], stolen=0.2)
    assert ledger.stolen == pytest.approx(0.05)


def test_an_output_of_another_length_counts_by_its_own_tokens() -> None:
    rows = [row("1", "plain", 2.0), row("1", "other", 1.0, counted=5)]
    ratio = against(rows, "plain", "other")
    assert ratio is not None
    assert ratio["speedup"] == 1.0


def test_a_ledger_goes_on_and_refuses_other_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.harness.ledger.commit", lambda: "abc")
    path = tmp_path / "rows.jsonl"
    settings = {"contenders": ["plain", "fast"]}
    done = [row("1", "plain", 2.0), row("1", "fast", 1.0)]
    Ledger(path, settings).add([*done, row("2", "plain", 2.0)])
    with path.open("a") as file:
        file.write('{"prompt": "2", "cut')
    monkeypatch.setattr("bench.harness.ledger.commit", lambda: "def")
    again = Ledger(path, settings)
    assert again.rows == [replace(each, commit="abc") for each in done]
    assert again.has("1", 0)
    assert not again.has("2", 0), "measured in turn with all contenders or not at all"
    again.add([row("2", "plain", 2.0), row("2", "fast", 1.0)])
    assert again.commits == "abc, def", "rows keep the commit that they were measured at"
    with pytest.raises(UserError, match="other settings"):
        Ledger(path, {"contenders": ["plain"]})


def test_a_comparison_checks_every_output_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a peer that drops tokens and one that is not installed."""
    folder = save_tiny_model(tmp_path / "model")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": text, "category": text[:2]}) for text in TEXTS))

    def wrong(engine: Engine) -> Decode:
        right = PEERS["transformers"](engine)

        def decode(ids: list[int], new: int) -> Timed:
            done = right(ids, new)
            return Timed([1, *done.token_ids[1:]], done.first_seconds, done.seconds, done.counted)

        return decode

    monkeypatch.setattr(compare, "PEERS", {**PEERS, "wrong": wrong})
    names = "knapsack,transformers,transformers-lookup,wrong"
    options = ["--model", str(folder), "--prompts", str(prompts), "--count", "3", "--max-new-tokens", "12"]
    monkeypatch.setattr(sys, "argv", ["compare", *options, "--contenders", names, "--out", str(tmp_path / "out")])
    for _ in range(2):
        compare.main()
        found = json.loads((tmp_path / "out" / "summary.json").read_text())["standings"]
        assert list(found) == ["plain", "plain again", "knapsack", "transformers", "transformers-lookup", "wrong"]
        for name, figures in found.items():
            each = figures["overall"]
            assert each["prompts"] == 3
            assert (each["error"] > 0) == (name == "wrong")
            assert each["tokens"] <= 3 * 11
        assert len((tmp_path / "out" / "rows.jsonl").read_text().splitlines()) == 1 + 3 * 6
    prompts.write_text(prompts.read_text().replace(TEXTS[0], TEXTS[0] + "!"))
    with pytest.raises(UserError, match="other settings"):
        compare.main()
    prompts.write_text(json.dumps({"id": "1", "prompt": "a"}) + "\n" + json.dumps({"id": "1", "prompt": "b"}))
    with pytest.raises(UserError, match="two prompts of one id"):
        compare.main()
