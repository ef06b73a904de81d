"""The comparison: what it counts, that it goes on, that it tells a wrong output."""

from __future__ import annotations

import io
import json
import re
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from rich.console import Console

from bench import at_once, compare, demo
from bench.demo import Contender, measure, table
from bench.harness.contenders import Decode, Timed
from bench.harness.ledger import NAME, Ledger, Row, commits_of, read_comparison
from bench.harness.peers import PEERS
from bench.harness.standings import against, standings
from ssd_profiles.errors import UserError
from ssd_profiles.prompts import Prompt
from ssd_runtime import Engine
from ssd_runtime.planning.settings import AutoSettings
from tests.folders import TEXTS
from tests.serving import tiny_engine


def row(prompt: str, contender: str, seconds: float, repeat: int = 0, counted: int = 10, category: str = "a") -> Row:
    return Row(prompt, category, contender, repeat, "none", counted + 1, 0.1, seconds, counted)


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


def test_an_output_of_another_length_counts_by_its_own_tokens() -> None:
    rows = [row("1", "plain", 2.0), row("1", "other", 1.0, counted=5)]
    ratio = against(rows, "plain", "other")
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
    whole = path.read_text()
    path.write_text(whole + '{"prompt": "2", "cycles": {}')
    assert Ledger(path, settings).rows == again.rows, "a last row that is cut after a bracket"
    for broken in ("", whole[:10]):
        (tmp_path / "broken").write_text(broken)
        with pytest.raises(UserError, match="holds no comparison"):
            Ledger(tmp_path / "broken", settings)
    again.add([row("2", "plain", 2.0), row("2", "fast", 1.0)])
    assert commits_of(again.rows) == "abc, def", "rows keep the commit that they were measured at"
    with pytest.raises(UserError, match="other settings"):
        Ledger(path, {"contenders": ["plain"]})


@pytest.mark.usefixtures("made_up_latencies")
def test_a_comparison_checks_every_output_and_goes_on(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a peer that drops tokens and one that is not installed."""
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


ROWS = [
    *(row(prompt, "plain", 2.0, repeat) for prompt in "abc" for repeat in range(3)),
    *(row("a", "auto", seconds, repeat) for repeat, seconds in enumerate((1.0, 2.0, 8.0))),
    *(row(prompt, "auto", 1.0, repeat) for prompt in "bc" for repeat in range(3)),
]


def test_repeats_make_an_interval_no_narrower() -> None:
    again = [*ROWS, *(Row(**{**asdict(each), "repeat": each.repeat + 3}) for each in ROWS)]
    assert against(again, "plain", "auto") == pytest.approx(against(ROWS, "plain", "auto"))


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        "\n".join(json.dumps({"prompt": f"{text[:40]} {number}"}) for number in range(6) for text in TEXTS[:2])
    )
    return path


def test_every_round_has_prompts_of_its_own() -> None:
    prompts = [Prompt(str(number), turns=("a",)) for number in range(14)]
    one, two = (list(at_once.batches(prompts, (1, 2), rounds)) for rounds in (1, 2))
    assert two[:2] == one
    assert [(number, load, len(some)) for number, load, some in two] == [(0, 1, 2), (0, 2, 4), (1, 1, 2), (1, 2, 4)]
    assert len({prompt.id for _, _, some in two for prompt in some}) == 12


@pytest.mark.usefixtures("made_up_latencies")
def test_requests_at_once(folder: Path, tmp_path: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    options = [str(folder), "--prompts", str(prompts), "--at", "1,2", "--max-new-tokens", "5"]
    for rounds in ("1", "2"):
        monkeypatch.setattr(sys, "argv", ["peers", *options, "--rounds", rounds, "--out", str(out)])
        at_once.main()
    monkeypatch.setattr(sys, "argv", ["peers", *options, "--rounds", "3", "--out", str(out)])
    with pytest.raises(UserError, match="take 18 prompts, got 12"):
        at_once.main()
    _, rows = read_comparison(out / NAME)
    assert {row.category for row in rows} == {"1 at once", "2 at once"}
    assert len({row.prompt for row in rows}) == 4
    assert {row.contender for row in rows} == {"plain", "auto"}
    assert all(row.divergence in ("none", "near_tie") for row in rows)
    assert {row.tokens for row in rows if row.category == "2 at once"} == {4 * 5}
    assert against([row for row in rows if row.category == "1 at once"], "plain", "auto") is not None


def test_both_ways_are_measured_on_every_prompt(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "MAX_NEW_TOKENS", 12)
    engine = tiny_engine(folder)
    contenders = [
        Contender("guesses alone", engine, AutoSettings(light=0)),
        Contender("auto", engine, AutoSettings(light=0)),
    ]
    found = measure(contenders, {"a river": TEXTS[0], "apples": TEXTS[1]})
    for row in found.values():
        assert list(row) == ["guesses alone", "auto"]
        for outcome in row.values():
            assert outcome.to_json()["identical"] is True
            assert outcome.plain is not None
    shown = io.StringIO()
    Console(file=shown, width=120).print(table("Both", found))
    lines = shown.getvalue().splitlines()
    [river, apples, both] = [line for line in lines if re.search("a river|apples|all", line)]
    assert [re.findall(r"\b\d+\b", line)[0] for line in (river, apples, both)] == ["12", "12", "24"]
    for line in (river, apples, both):
        assert len(re.findall(r"\d+\.\d\dx", line)) == 2
