"""The page of the papers, from the outcomes that are kept."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.fixtures.bundles import MadeBundle
from bench.harness.code_digest import packages_digest
from bench.harness.ledger import Row
from bench.harness.outcomes import Outcome, outcome_of, read_outcomes
from bench.papers.claims import CLAIMS
from bench.papers.claims.conditions import untried
from bench.papers.page import PAGE, page
from bench.papers.parts import LATE, PARTS, Comparison, quick_parts
from bench.papers.scoreboard import Claim, Look, measured_once, verdict
from ssd_runtime.planning.registry import check_strategy, read_settings
from tests.folders import TEXTS

NAMES = {part.name for part in PARTS}
BUNDLE = MadeBundle("demo", "demo", "cnn")


def test_every_comparison_names_strategies_and_parameters_that_there_are() -> None:
    assert len(NAMES) == len(PARTS)
    for comparison in PARTS:
        for contender in comparison.names():
            name, *assignments = contender.split("+")
            check_strategy(name, has_bundle=True)
            read_settings(name, assignments)


def test_the_quick_mode_asks_the_same_contenders_of_one_bundle_on_fewer_prompts() -> None:
    whole = {part.name: part for part in PARTS}
    assert {"qwen", "qwen-domains", "qwen-clasp", "qwen-context-2048"} <= {part.name for part in quick_parts()}
    for part in quick_parts():
        assert part.names() == whole[part.name].names()
        assert 1 <= part.count <= max(1, whole[part.name].count // 4)
    assert len({part.bundle for part in quick_parts()}) == 1


def test_the_committed_page_has_every_claim_with_its_figures() -> None:
    outcomes = read_outcomes()
    text = page(outcomes, packages_digest())
    written = PAGE.read_text(encoding="utf-8")
    # Whether figures are stale depends on the packages, which change without the page.
    assert text.replace("; stale", "") == written.replace("; stale", ""), "run python -m bench.papers"
    for claim in CLAIMS:
        row = next(line for line in text.splitlines() if line.startswith(f"| {claim.says} |"))
        assert claim.reason in row
        found = verdict(claim, Look(outcomes))
        assert (found == "cannot be tried here") == (not claim.holds)
        assert (found == "not tried") == (claim.holds == (untried,))


def test_every_outcome_decides_a_claim_and_every_claim_names_its_measurements() -> None:
    named = {name for claim in CLAIMS for name in claim.part.split(",") if name}
    assert named == NAMES | LATE.keys() | measured_once().keys()
    assert set(read_outcomes()) == NAMES | LATE.keys()


def rows(seconds: dict[str, float], count: int = 4) -> tuple[Row, ...]:
    """`count` prompts of twenty tokens, each in so many seconds; the first one takes a fifth longer."""
    return tuple(
        Row(
            prompt=str(i),
            category="a",
            contender=name,
            repeat=0,
            divergence="none",
            tokens=21,
            first_seconds=0.1,
            seconds=each * (1.0 if i or name == "plain" else 1.2),
            counted=20,
            cycles={"plain_steps": 20, "plain_seconds": 2.0},
            stolen=0.013,
        )
        for i in range(count)
        for name, each in seconds.items()
    )


def outcome(part: str, packages: str | None = "now", **others: object) -> Outcome:
    return Outcome(part=part, processor="A CPU (R) 2", origin="By hand.", packages=packages, **others)  # type: ignore[arg-type]


def test_an_outcome_on_disk_is_the_same_again(tmp_path: Path) -> None:
    one = outcome("one", rows=rows({"plain": 2.0, "swift": 1.0}), settings={"contenders": ["plain"]}, commit="abc")
    two = outcome("two", known={"swift": {"speedup": 0.5}})
    for each in (one, two):
        each.write(tmp_path)
    found = read_outcomes(tmp_path)
    assert found == {"one": [one], "two": [two]}
    assert found["one"][0].figures["swift"]["speedup"] == pytest.approx(8.0 / 4.2)
    assert found["one"][0].figures["swift"]["minimum"] == pytest.approx(2.0 / 1.2)
    assert found["two"][0].figures["swift"]["speedup"] == 0.5
    assert outcome_of(found, "one", "a cpu R 2") == one
    assert outcome_of(found, "one", "another") is None
    before = (tmp_path / "a-cpu-r-2" / "one.json").read_bytes()
    found["one"][0].write(tmp_path)
    assert (tmp_path / "a-cpu-r-2" / "one.json").read_bytes() == before


def test_a_verdict_follows_from_the_outcomes() -> None:
    def look(speed: float) -> Look:
        return Look({"one": [outcome("one", known={"a": {"speedup": speed}})]})

    claim = Claim("p", "s", "r", holds=(lambda look: look("one", "a") > 1, lambda look: look("one", "a") > 2))
    assert [verdict(claim, look(speed)) for speed in (0.9, 1.5, 2.5)] == ["not", "partly", "**reproduced**"]
    assert verdict(claim, Look({})) == "not tried"
    assert verdict(Claim("p", "s", "r"), look(3.0)) == "cannot be tried here"


def test_only_an_outcome_of_these_contenders_and_this_bundle_is_current() -> None:
    part = Comparison("x", "X", BUNDLE, ("swift", "fixed:{first}"))
    settings = {"contenders": ["plain", "plain again", "swift", "fixed:cnn"], "bundle": BUNDLE.digest()}
    assert part.is_current(outcome("x", settings=settings))
    assert not part.is_current(outcome("x", settings=settings | {"contenders": ["plain", "swift"]}))
    assert not part.is_current(outcome("x", settings=settings | {"bundle": "another"}))


def test_a_comparison_is_measured_by_the_command(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs in this process, which saves the seconds that its imports take."""

    def run(command: list[str], **_: bool) -> SimpleNamespace:
        assert command[1] == "-m"
        monkeypatch.setattr(sys, "argv", command[2:])
        with pytest.raises(SystemExit) as ended:
            runpy.run_module(command[2], run_name="__main__")
        return SimpleNamespace(returncode=ended.value.code)

    monkeypatch.setattr("bench.papers.parts.subprocess", SimpleNamespace(run=run))
    model = str(folder)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS[:2]))
    bundle = MadeBundle(model, model, "cnn")
    part = Comparison("x", "X", bundle, ("clasp",), tokens=6, is_priced=True, stream=str(prompts), without_bundle=True)
    found = part.measure(tmp_path / "out", "now")
    assert part.is_current(found)
    assert {row.divergence for row in found.rows} == {"none"}
    assert len({row.prompt for row in found.rows}) == 2
    assert (found.settings or {}).get("latency") == "AMD EPYC (bb96a4)"
