"""A speed in the README or the guide stands on the page of the benchmarks too, which a command writes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench.benchmarks.__main__ import OUTCOMES
from bench.benchmarks.page import QUOTE, QUOTING, quoted
from bench.harness.outcomes import read_outcomes

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "docs" / "benchmarks.md"
TEXTS = [ROOT / "README.md", *sorted((ROOT / "docs" / "guide").glob("*.md"))]
NUMBER = r"\d{1,3}\.\d{1,2}"
INTERVAL = rf"\(({NUMBER})–({NUMBER})\)"
FOLLOWED = rf"(?:<!--/f-->)?\s*(?:×|x\b|times\b|of plain\b|\({NUMBER}–{NUMBER}\))"
SPEED = re.compile(rf"(?<![\w.])({NUMBER})(?={FOLLOWED})|{INTERVAL}")
"""A number that is followed by ×, x, `times`, `of plain` or an interval in brackets, and the ends of an interval."""
EXAMPLE = re.compile(r"^.*<!-- example -->$", re.MULTILINE)
"""A line whose figures show a form of output, not a measurement."""


def speeds(text: str) -> set[str]:
    """The speed figures of a text, as they are written."""
    found = SPEED.findall(EXAMPLE.sub("", text).replace("**", ""))
    return {number for groups in found for number in groups if number}


def unknown(text: str, page: str) -> set[str]:
    """The speed figures of a text that a page has not."""
    return speeds(text) - set(re.findall(rf"(?<![\w.])({NUMBER})(?![\w.]|\d)", page))


def test_speeds_are_found_in_all_their_forms() -> None:
    assert speeds("reaches **1.61** (1.47–1.76), 2.24×, 1.5 times, 0.9x, 1.08 of plain decoding") == {
        *("1.61", "1.47", "1.76", "2.24", "1.5", "0.9", "1.08")
    }
    assert speeds("<!--f a: b-->1.42 (1.26–1.60)<!--/f--> and <!--f a: c-->3.10<!--/f--> times") == {
        *("1.42", "1.26", "1.60", "3.10")
    }
    assert not speeds("torch 2.13, 2.4% of the time, version 5.23, top-p 0.95, 6.5 plain steps")
    assert not speeds("*auto is 1.40 (1.20–1.60) times as fast* <!-- example -->\n")


def test_a_figure_that_the_page_has_not_is_told() -> None:
    assert unknown("It is 1.61 times as fast.", "| `auto` | 1.61 (1.50–1.70) |") == set()
    assert unknown("It is 1.62 times as fast.", "| `auto` | 1.61 (1.50–1.70), 11.62 tokens/s |") == {"1.62"}


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_every_speed_is_on_the_page_of_the_benchmarks(path: Path) -> None:
    missing = unknown(path.read_text(encoding="utf-8"), BENCHMARKS.read_text(encoding="utf-8"))
    assert not missing, f"{path.name}: not in docs/benchmarks.md: {', '.join(sorted(missing))}"


def test_quoted_figures_are_those_of_the_outcomes() -> None:
    outcomes = read_outcomes(OUTCOMES)
    assert {path.resolve() for path in QUOTING} == set(TEXTS)
    marks = 0
    for path in TEXTS:
        text = path.read_text(encoding="utf-8")
        marks += len(QUOTE.findall(text))
        assert quoted(text, outcomes) == text, f"{path.name}: run python -m bench.benchmarks --page"
    assert marks > 5
