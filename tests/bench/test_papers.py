"""The page of the papers, from the outcomes that are kept."""

from __future__ import annotations

import importlib.util
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from bench.fixtures.bundles import MadeBundle
from bench.harness.code_digest import meaning, packages_digest
from bench.harness.comparison import Comparison
from bench.harness.drawing.picture import Picture
from bench.harness.ledger import Row
from bench.harness.measurement import Measurement
from bench.harness.outcomes import Outcome, outcome_of, read_outcomes
from bench.papers.claims import CLAIMS
from bench.papers.claims.conditions import NUMBERS
from bench.papers.page import page
from bench.papers.parts import COMPARISONS, MEASUREMENTS, PARTS
from bench.papers.scoreboard import Claim, Look, NotMeasuredError, verdict
from ssd_runtime.planning.registry import check_strategy, read_settings

BY_NAME = {part.name: part for part in PARTS}
BUNDLE = MadeBundle("demo", "demo", "cnn")


def test_every_comparison_names_strategies_and_parameters_that_there_are() -> None:
    assert len(BY_NAME) == len(PARTS)
    for comparison in COMPARISONS:
        for contender in comparison.contenders:
            name, *assignments = contender.format(first=comparison.bundle.first).split("+")
            check_strategy(name, has_bundle=True)
            read_settings(name, assignments)


def test_every_measurement_is_a_tool_that_there_is() -> None:
    assert all(importlib.util.find_spec(measurement.tool) for measurement in MEASUREMENTS)


def test_the_committed_outcomes_make_the_page_with_every_claim() -> None:
    outcomes = read_outcomes()
    assert set(outcomes) <= set(BY_NAME) | {f"{name}-full" for name in BY_NAME}
    text = page(outcomes, packages_digest())
    scoreboard = text[text.index("| paper |") :].partition("\n\n")[0]
    assert scoreboard.count("\n|") == len(CLAIMS) + 1 >= 25
    assert "REASON" not in text
    for part in outcomes:
        assert f"## {BY_NAME[part.removesuffix('-full')].title}\n" in text


def test_claims_name_parts_and_figures_that_there_are() -> None:
    for claim in CLAIMS:
        assert set(filter(None, claim.part.split(","))) <= set(BY_NAME), claim.says
        assert claim.part or not claim.holds
    outcomes = read_outcomes()
    for part, pattern in NUMBERS.values():
        assert part in BY_NAME
        re.compile(pattern)
        if part in outcomes and "7" not in pattern:
            printed = outcomes[part][0].printed
            assert re.search(pattern, printed) or "nothing drafted" in printed, pattern


def rows(seconds: dict[str, float], count: int = 4) -> tuple[Row, ...]:
    """`count` prompts of twenty tokens, each in so many seconds; the first one takes a fifth longer."""
    cycles = {
        "forwards": 5,
        "drafts": 4,
        "drafted": 20,
        "accepted": 16,
        "draft_tokens": 20,
        "draft_seconds": 0.5,
        "verify_seconds": 0.4,
        "skipped_attention": 40,
        "skipped_mlp": 20,
        "plan_seconds": 0.01,
        "plain_steps": 1,
        "plain_seconds": 0.1,
    }
    plain = {**dict.fromkeys(cycles, 0), "plain_steps": 20, "plain_seconds": 2.0}
    return tuple(
        Row(
            prompt=str(i),
            category="a",
            contender=name,
            repeat=0,
            divergence="none" if name == "plain" else "error",
            tokens=21,
            first_seconds=0.1,
            seconds=each * (1.0 if i or name == "plain" else 1.2),
            counted=20,
            cycles=plain if name == "plain" else cycles,
            stolen=0.013,
        )
        for i in range(count)
        for name, each in seconds.items()
    )


def outcome(part: str, packages: str | None = "now", **others: object) -> Outcome:
    return Outcome(part=part, processor="A CPU (R) 2", origin="By hand.", packages=packages, **others)  # type: ignore[arg-type]


def test_an_outcome_on_disk_is_the_same_again(tmp_path: Path) -> None:
    one = outcome("one", rows=rows({"plain": 2.0, "swift": 1.0}), settings={"contenders": ["plain"]}, commit="abc")
    two = outcome("two", printed="It took | 3 s\n", known={"swift": {"speedup": 0.5}})
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


def test_a_part_measured_again_leaves_the_others_and_other_processors(tmp_path: Path) -> None:
    outcome("one", "old", printed="1").write(tmp_path)
    outcome("two", "old", printed="2").write(tmp_path)
    Outcome(part="one", processor="Other", origin="", packages="old", printed="3").write(tmp_path)
    outcome("one", "new", printed="4").write(tmp_path)
    found = read_outcomes(tmp_path)
    assert {each.printed for each in found["one"]} == {"3", "4"}
    assert [each.printed for each in found["two"]] == ["2"]


def test_the_page_states_speed_interval_slowest_prompt_and_wrong_outputs() -> None:
    part = COMPARISONS[0]
    fresh = outcome(part.name, rows=rows({"plain": 2.0, "swift": 1.0}), commit="abc1234")
    text = page({part.name: [fresh]}, "now")
    assert COMPARISONS[1].title not in text
    assert "By hand. Commit abc1234, " in text
    assert "Other guests of the machine took 1.3% of its processors' time." in text
    assert "| `swift` | **1.90** (1.64–2.22) | 1.67 | 0% | 5.00 | 0.80 | 0.25 | 1.00 |" in text
    assert "10 + 5" in text
    assert "4 WRONG" in text
    assert "| ÷ plain | a |\n|---|---|\n| `plain` | 1.00 |\n| `swift` | 1.90 |" in text
    assert text.count("*Stale.*") == 0
    assert page({part.name: [fresh]}, "later").count("*Stale.*") == 1


def test_contenders_are_paired_by_prompt() -> None:
    """The second contender is slower by the same factor on every prompt, however long these take."""
    some = rows({"plain": 2.0, "knn": 1.0})
    slower = [replace(row, contender="mix", seconds=1.1 * row.seconds) for row in some if row.contender == "knn"]
    look = Look({"one": [outcome("one", rows=(*some, *slower))]}, "now")
    assert [look.ratio("one", "knn", "mix", each) for each in ("speedup", "low", "high")] == pytest.approx([1.1] * 3)
    part = Comparison(name="one", title="One", bundle=BUNDLE, contenders=("knn", "mix"), paired=(("knn", "mix"),))
    shown = part.section(outcome("one", rows=(*some, *slower)))
    assert "Paired by prompt: `knn` ÷ `mix`: 1.10 (1.10–1.10)." in shown
    with pytest.raises(NotMeasuredError):
        look.ratio("one", "knn", "swift")


def test_a_verdict_follows_from_the_outcomes() -> None:
    def look(speed: float) -> Look:
        return Look({"one": [outcome("one", known={"a": {"speedup": speed}})]}, "now")

    claim = Claim("p", "s", "r", holds=(lambda look: look("one", "a") > 1, lambda look: look("one", "a") > 2))
    assert [verdict(claim, look(speed)) for speed in (0.9, 1.5, 2.5)] == ["not", "partly", "**reproduced**"]
    assert verdict(claim, Look({}, "now")) == "not tried"
    assert verdict(Claim("p", "s", "r"), look(3.0)) == "cannot be tried here"
    known = look(3.0)
    known("one", "a")
    assert not known.stale
    later = Look({"one": [outcome("one", "old", known={"a": {"speedup": 1.0}})]}, "now")
    later("one", "a")
    assert later.stale


def test_only_an_outcome_of_these_contenders_and_this_bundle_is_current() -> None:
    part = Comparison(name="x", title="X", bundle=BUNDLE, contenders=("swift", "fixed:{first}"))
    settings = {"contenders": ["plain", "plain again", "swift", "fixed:cnn"], "bundle": BUNDLE.digest()}
    assert part.is_current(outcome("x", settings=settings))
    assert not part.is_current(outcome("x", settings=settings | {"contenders": ["plain", "swift"]}))
    assert not part.is_current(outcome("x", settings=settings | {"bundle": "another"}))


def test_rows_are_restored_for_tools_that_read_them(tmp_path: Path) -> None:
    part = Comparison(name="x", title="X", bundle=BUNDLE, contenders=("swift",))
    kept = outcome("x", rows=rows({"plain": 2.0, "swift": 1.0}), settings={"contenders": ["plain", "swift"]})
    part.restore(kept, tmp_path)
    first, *lines = (tmp_path / "x" / "rows.jsonl").read_text().splitlines()
    assert json.loads(first) == kept.settings
    assert [Row(**json.loads(line)) for line in lines] == list(kept.rows)
    (tmp_path / "x" / "rows.jsonl").write_text("more")
    part.restore(kept, tmp_path)
    assert (tmp_path / "x" / "rows.jsonl").read_text() == "more"


def test_what_a_tool_prints_is_kept_and_shown(tmp_path: Path) -> None:
    measurement = Measurement("zen", "The Zen", "this", (), BUNDLE)
    found = measurement.measure(tmp_path, full=False, packages="now")
    assert found.printed.endswith("let's do more of those!")
    assert "Command: `python -m this`." in found.origin
    assert measurement.is_current(found)
    assert not Measurement("zen", "The Zen", "this", ("more",), BUNDLE).is_current(found)
    assert "```text\nThe Zen of Python" in measurement.section(found)


def test_what_was_measured_on_another_bundle_is_measured_again(tmp_path: Path) -> None:
    measurement = Measurement("list", "Files", "compileall", ("-q", "-l", "-d", "demo"), BUNDLE)
    found = measurement.measure(tmp_path, full=False, packages="now")
    assert measurement.is_current(found)
    assert not measurement.is_current(outcome("list", settings={**(found.settings or {}), "bundle": "another"}))


def test_a_tool_that_reads_a_model_alone_needs_no_bundle(tmp_path: Path) -> None:
    model = MadeBundle(str(tmp_path), str(tmp_path), "cnn")
    measurement = Measurement("list", "Files", "compileall", ("-q", "-l", str(tmp_path)), model, without_bundle=True)
    found = measurement.measure(tmp_path, full=False, packages="now")
    assert "Bundle" not in found.origin
    assert measurement.is_current(found)


def test_what_follows_from_other_parts_is_done_anew_and_says_nothing_of_a_machine(tmp_path: Path) -> None:
    listing = ("{out}", "-q", "-l", "-d", "nothing")
    measurement = Measurement("list", "Files", "compileall", listing, BUNDLE, derived=True)
    found = measurement.measure(tmp_path, full=False, packages="now")
    assert found.origin == "Command: `python -m compileall build/papers -q -l -d nothing`."
    assert not measurement.is_current(found)


def test_a_bundle_that_is_missing_says_how_it_is_made(tmp_path: Path) -> None:
    assert MadeBundle("demo", "demo", "cnn").missing is None
    assert MadeBundle(str(tmp_path), "m", "cnn", "make it").missing is None
    exits = MadeBundle(str(tmp_path), "m", "cnn", "make it --exits 8")
    assert "make it --exits 8" in (exits.missing or "")
    (tmp_path / "exits.safetensors").touch()
    assert exits.missing is None


def test_pictures_stand_on_the_page_where_they_have_been_drawn(tmp_path: Path) -> None:
    drawn, page_file = tmp_path / "outcomes", tmp_path / "docs" / "page.md"
    page_file.parent.mkdir()
    picture = Picture("part/speed", "shown", "What it shows")
    picture.publish(drawn, page_file)
    assert picture.markdown(page_file) is None
    (drawn / "part").mkdir(parents=True)
    (drawn / "part" / "speed.png").write_bytes(b"png")
    picture.publish(drawn, page_file)
    shown = picture.markdown(page_file) or ""
    assert shown == "![What it shows](pictures/shown.png)\n\n*What it shows*\n"
    assert (page_file.parent / "pictures" / "shown.png").read_bytes() == b"png"


def test_only_what_can_change_a_figure_makes_outcomes_stale() -> None:
    code = b'def f(x):\n    """Text."""\n    return option(x, help="more")  # why\n'
    assert meaning(code) == meaning(b'def f(x):\n    return option(x, help="less")\n')
    assert meaning(code) != meaning(b"def f(x):\n    return option(x + 1)\n")
    assert meaning(code) != meaning(b'def f(x):\n    return option(x, default="more")\n')
