"""The page of the benchmarks: its figures come from rows, and other texts quote it."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from bench.benchmarks.__main__ import OUTCOMES
from bench.benchmarks.figures import Equal, Rate, Ratio, Size
from bench.benchmarks.page import GLANCE, PAGE
from bench.benchmarks.parts import PARTS
from bench.compare import SINGLE
from bench.harness.ledger import NOT_COMPARED, Row, write_rows
from bench.harness.outcomes import Outcome, read_outcomes
from bench.harness.peers.in_process import PEERS
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


def outcome(made: Sequence[Row] = (), part: str = "off-grid", processor: str = "A CPU (123abc)") -> Outcome:
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
        for each in outcomes.get(part.name, []):
            for figure in part.figures:
                assert figure.text(each) in written, f"{part.name}: {figure.key}; run python -m bench.benchmarks --page"
