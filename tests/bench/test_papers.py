"""The page of the papers, from what comparisons have written."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

from bench.fixtures.bundles import MadeBundle
from bench.harness.ledger import Row
from bench.harness.measurement import Measurement
from bench.harness.picture import Picture
from bench.harness.standings import standings
from bench.papers.__main__ import page
from bench.papers.parts import COMPARISONS, MEASUREMENTS
from ssd_runtime.planning.registry import check_strategy, read_settings


def test_every_comparison_names_strategies_and_parameters_that_there_are() -> None:
    assert len({part.name for part in (*COMPARISONS, *MEASUREMENTS)}) == len(COMPARISONS) + len(MEASUREMENTS)
    for comparison in COMPARISONS:
        for contender in comparison.contenders:
            name, *assignments = contender.format(first=comparison.bundle.first).split("+")
            check_strategy(name, has_bundle=True)
            read_settings(name, assignments)


def test_every_measurement_is_a_tool_that_there_is() -> None:
    assert all(importlib.util.find_spec(measurement.tool) for measurement in MEASUREMENTS)


def test_the_page_states_speed_interval_and_wrong_outputs(tmp_path: Path) -> None:
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
    rows = [
        Row(str(i), "a", name, 0, divergence, 21, 0.1, seconds, 20, found)
        for i in range(4)
        for name, divergence, seconds, found in (("plain", "none", 2.0, plain), ("swift", "error", 1.0, cycles))
    ]
    device = {"device": "A CPU", "threads": 2, "torch": "2.13", "dtype": "float32"}
    settings = {"device": device, "prompts": ["some.jsonl", 4], "max_new_tokens": 21, "bundle": "0123456789ab"}
    figures = standings(rows, ["plain"])
    summary = {"settings": settings, "commit": "abc1234", "stolen": 0.013, "standings": figures}
    (tmp_path / COMPARISONS[0].name).mkdir()
    (tmp_path / COMPARISONS[0].name / "summary.json").write_text(json.dumps(summary))
    text = page(tmp_path)
    assert COMPARISONS[0].bundle.make in text
    assert COMPARISONS[1].title not in text
    assert "Bundle 01234567: " in text
    assert "Commit abc1234." in text
    assert "Other guests of the machine took 1.3% of its processors' time." in text
    assert "| `swift` | **2.00** (2.00–2.00) | 5.00 | 0.80 | 0.25 | 1.00 |" in text
    assert "10 + 5" in text
    assert "4 WRONG" in text
    assert "| ÷ plain | a |\n|---|---|\n| `plain` | 1.00 |\n| `swift` | 2.00 |" in text


def test_what_a_tool_prints_is_kept_and_shown(tmp_path: Path) -> None:
    measurement = Measurement("zen", "The Zen", "this", (), MadeBundle("demo", "demo", "cnn"))
    assert measurement.section(tmp_path) is None
    measurement.run(tmp_path, full=False)
    shown = measurement.section(tmp_path)
    assert shown is not None
    assert "Beautiful is better than ugly." in shown
    (tmp_path / "zen.txt").write_text(f"here: `{measurement.command(tmp_path)}`.\nanother")
    measurement.run(tmp_path, full=False)
    assert "another" in (measurement.section(tmp_path) or "")
    (tmp_path / "zen.txt").write_text("here: `python -m that`.\nanother")
    assert measurement.section(tmp_path) is None, "of other arguments"


def test_what_was_measured_on_another_bundle_is_measured_again(tmp_path: Path) -> None:
    bundle = MadeBundle("demo", "demo", "cnn")
    measurement = Measurement("list", "Files", "compileall", ("-q", "-l", "-d", "demo"), bundle)
    for origin, kept in ((bundle.digest()[:8], True), ("01234567", False)):
        (tmp_path / "list.txt").write_text(f"Bundle {origin}. Command: `{measurement.command(tmp_path)}`.\nfound")
        assert "found" in (measurement.section(tmp_path) or ""), "and shown until then"
        measurement.run(tmp_path, full=False)
        assert ("found" in (measurement.section(tmp_path) or "")) == kept


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
    assert picture.markdown(drawn) is None
    (drawn / "part").mkdir(parents=True)
    (drawn / "part" / "speed.png").write_bytes(b"png")
    picture.publish(drawn, page_file)
    shown = picture.markdown(drawn) or ""
    assert shown == "![What it shows](pictures/shown.png)\n"
    assert (page_file.parent / "pictures" / "shown.png").read_bytes() == b"png"


def test_what_follows_from_other_parts_is_done_anew_and_says_nothing_of_a_machine(tmp_path: Path) -> None:
    bundle = MadeBundle("demo", "demo", "cnn")
    listing = ("{out}", "-q", "-l", "-d", "nothing")
    measurement = Measurement("list", "Files", "compileall", listing, bundle, derived=True)
    measurement.run(tmp_path, full=False)
    section = measurement.section(tmp_path) or ""
    assert section == f"## Files\n\nCommand: `python -m compileall {tmp_path} -q -l -d nothing`.\n"
    (tmp_path / "list.txt").write_text(f"Command: `{measurement.command(tmp_path)}`.\nold")
    measurement.run(tmp_path, full=False)
    assert "old" not in (measurement.section(tmp_path) or "")
