"""The page of the benchmarks: its figures come from rows, and other texts quote it."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from bench.benchmarks.__main__ import OUTCOMES
from bench.benchmarks.figures import Equal, Rate, Ratio, Size
from bench.benchmarks.page import GLANCE, PAGE, page, quoted, today, value
from bench.benchmarks.parts import PARTS
from bench.compare import SINGLE
from bench.harness.ledger import NOT_COMPARED, Row, write_rows
from bench.harness.outcomes import Outcome, read_outcomes
from bench.harness.peers.in_process import PEERS
from ssd_profiles.errors import UserError
from ssd_runtime.planning.registry import check_strategy, read_settings


def rows(seconds: dict[str, float], divergence: str = "none") -> tuple[Row, ...]:
    """Four prompts of ten tokens; a contender takes so many seconds for each, the first one a fifth longer."""
    return tuple(
        Row(
            prompt=str(prompt),
            category="odd" if prompt % 2 else "even",
            contender=name,
            repeat=0,
            divergence="none" if name == "plain" else divergence,
            tokens=11,
            first_seconds=0.1,
            seconds=each * (1.2 if prompt == 0 else 1.0),
            counted=10,
            commit="abc",
        )
        for prompt in range(4)
        for name, each in seconds.items()
    )


def outcome(made: Sequence[Row] = (), part: str = "spec-bench", processor: str = "A CPU (123abc)") -> Outcome:
    return Outcome(part, processor, "2 threads", packages="now", commit="abc", date="2026-01-02", rows=tuple(made))


def test_figures_are_those_of_the_rows() -> None:
    measured = outcome(rows({"plain": 2.0, "auto": 1.0}))
    ratio = Ratio("auto", "auto", "plain", bold=True)
    assert ratio.key == "auto/plain"
    assert ratio.text(measured) == "**2.00** (2.00–2.00)"
    assert Ratio("auto", "auto", "plain", "odd").text(measured) == "2.00"
    assert Ratio("auto", "auto", "transformers").text(measured) == ""
    assert Rate("plain", "plain").text(measured) == f"{40 / 8.4:.1f}"
    assert Rate("auto", "light").text(measured) == ""
    assert Equal().text(measured) == "4 of 4"
    assert Size().text(measured) == "4"


def test_near_ties_and_wrong_outputs_are_told() -> None:
    assert Equal().text(outcome(rows({"plain": 1.0, "auto": 1.0}, "near_tie"))) == "0 of 4, 4 near ties"
    assert "4 WRONG" in Equal().text(outcome(rows({"plain": 1.0, "auto": 1.0}, "error")))
    assert Equal().text(outcome(rows({"plain": 1.0, "auto": 1.0}, NOT_COMPARED))) == "0 of 0"


def test_a_figure_of_an_earlier_command_gives_way_to_a_measured_one() -> None:
    earlier = replace(outcome(processor="Other"), known={"auto/plain": {"speedup": 9.0, "low": 8.0, "high": 9.5}})
    assert value({"spec-bench": [earlier]}, "spec-bench", "auto/plain") == "9.00 (8.00–9.50)"
    measured = outcome(rows({"plain": 2.0, "auto": 1.0}))
    found = {"spec-bench": [earlier, measured]}
    assert today(found) == {"spec-bench": [measured]}
    assert value(found, "spec-bench", "auto/plain") == "2.00 (2.00–2.00)"
    assert "9.00" not in page(found, "now")


def test_the_page_has_a_column_per_machine_and_names_what_was_not_measured() -> None:
    first = outcome(rows({"plain": 2.0, "auto": 1.0}))
    other = outcome(rows({"plain": 3.0, "auto": 1.0}), processor="B CPU (456def)")
    text = page({"spec-bench": [first, other]}, "now")
    assert "|  | A CPU | B CPU |" in text
    assert "| **2.00** (2.00–2.00) | **3.00** (3.00–3.00) |" in text
    assert "the code has changed since" not in text
    assert "the code has changed since" in page({"spec-bench": [first]}, "later")
    assert "## Not measured yet" in text


def test_texts_quote_the_outcomes() -> None:
    found = {"spec-bench": [outcome(rows({"plain": 2.0, "auto": 1.0}))]}
    text = "It is <!--f spec-bench: auto/plain-->1.00<!--/f--> times on <!--f spec-bench: machine--><!--/f-->."
    filled = quoted(text, found)
    assert "-->2.00 (2.00–2.00)<!--/f-->" in filled
    assert "-->A CPU<!--/f-->" in filled
    assert quoted(filled, found) == filled
    assert "not measured" in quoted(text, {})
    with pytest.raises(UserError, match="no such figure"):
        quoted("<!--f spec-bench: speed--><!--/f-->", found)


def test_texts_quote_the_machine_with_the_most_parts_even_where_another_was_measured_later() -> None:
    slow, fast = rows({"plain": 2.0, "auto": 1.0}), rows({"plain": 3.0, "auto": 1.0})
    first, later = outcome(slow), outcome(fast, processor="B CPU (456def)")
    found = {"spec-bench": [later, first], "gsm8k": [outcome(slow, part="gsm8k")]}
    assert value(found, "spec-bench", "auto/plain") == "2.00 (2.00–2.00)"
    assert value({"spec-bench": [later, first]}, "spec-bench", "auto/plain") == "3.00 (3.00–3.00)"


def test_every_part_is_a_command_that_there_is() -> None:
    assert len({part.name for part in PARTS}) == len(PARTS)
    for part in PARTS:
        assert importlib.util.find_spec(part.tool) is not None
        assert len({figure.key for figure in part.figures}) == len(part.figures)
        words = list(part.arguments)
        if part.tool == "bench.compare":
            for name in words[words.index("--contenders") + 1].split(","):
                if name not in PEERS:
                    strategy, *assignments = name.removeprefix(SINGLE).split("+")
                    check_strategy(strategy, has_bundle=True)
                    read_settings(strategy, assignments)
        assert "--model demo " not in " ".join(words) + " ", "other weights where a hub can be reached"
    known = {(part.name, figure.key) for part in PARTS for figure in part.figures}
    assert set(GLANCE) <= known


def test_an_outcome_is_read_from_a_commands_rows(tmp_path: Path) -> None:
    part = PARTS[0]
    device = {"device": "A CPU (123abc)", "threads": 2, "torch": "2", "dtype": "float32"}
    write_rows(tmp_path / part.name / "rows.jsonl", {"device": device, "name": "tiny"}, rows({"plain": 1.0}))
    found = part.outcome(tmp_path, part.command(), "now")
    assert found.commit == "abc"
    assert part.is_current(found, None)
    assert not part.is_current(found, 3)
    found.write(tmp_path / "outcomes")
    [again] = read_outcomes(tmp_path / "outcomes")[part.name]
    assert again.rows == found.rows
    assert part.shown(again) == part.shown()


def test_the_committed_page_has_the_figures_of_the_committed_outcomes() -> None:
    written = PAGE.read_text(encoding="utf-8")
    outcomes = read_outcomes(OUTCOMES)
    assert set(outcomes) <= {part.name for part in PARTS}
    for part in PARTS:
        for each in today(outcomes).get(part.name, []):
            for figure in part.figures:
                assert figure.text(each) in written, f"{part.name}: {figure.key}; run python -m bench.benchmarks --page"
