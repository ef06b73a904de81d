"""The page of the benchmarks: its figures come from rows, and other texts quote it."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

import pytest

from bench.benchmarks import __main__ as command
from bench.benchmarks.__main__ import OUTCOMES
from bench.benchmarks.figures import EQUAL, FASTEST, SIZE, peer, rate, ratio
from bench.benchmarks.page import GENERATIONS, GLANCE, PAGE, machines, minutes
from bench.benchmarks.parts import PARTS, Part
from bench.compare import SINGLE
from bench.harness.ledger import NOT_COMPARED, Row, write_rows
from bench.harness.outcomes import Outcome, read_outcomes
from bench.harness.peers import PEERS
from bench.llama_cpp import LLAMA
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


def outcome(made: Sequence[Row] = (), part: str = "off-grid", processor: str = "A CPU (123abc)") -> Outcome:
    return Outcome(
        part=part,
        processor=processor,
        origin="2 threads; tiny",
        packages="now",
        commit="abc",
        date="2026-01-02",
        settings={"max_new_tokens": 11},
        rows=tuple(made),
    )


def test_figures_are_those_of_the_rows() -> None:
    measured = outcome(rows({"plain": 2.0, "auto": 1.0}))
    speed = ratio("auto", "auto", "plain", bold=True)
    assert speed.key == "auto/plain"
    assert speed.text(measured) == "**2.00** (2.00–2.00)"
    assert ratio("auto", "auto", "plain", "odd").text(measured) == "2.00"
    assert ratio("auto", "auto", "transformers").text(measured) == ""
    assert rate("plain", "plain").text(measured) == f"{40 / 8.4:.1f}"
    assert rate("auto", "light").text(measured) == ""
    assert SIZE.text(measured) == "4 × 11"


def test_the_fastest_setting_of_llama_cpp_is_the_one_with_most_tokens_per_second() -> None:
    measured = outcome(rows({LLAMA: 3.0, f"{LLAMA} ngram-mod": 2.0, "plain": 2.5, "auto": 1.0}))
    assert FASTEST.text(measured) == "**2.00** (2.00–2.00)"
    assert FASTEST.text(outcome(rows({"plain": 2.0, "auto": 1.0}))) == ""
    assert peer("", f"{LLAMA} ngram-mod").text(measured) == f"{40 / 8.4:.1f}; 2.00 (2.00–2.00)"


def test_only_outputs_of_ours_with_drafts_are_counted_as_equal() -> None:
    made = rows(
        {"plain": 2.0, "plain again": 2.0, "auto": 1.0, "single:auto": 1.0, "transformers-lookup": 2.0, LLAMA: 1.0}
    )
    assert EQUAL.text(outcome(made)) == "8 of 8"


def test_near_ties_and_wrong_outputs_are_told() -> None:
    assert EQUAL.text(outcome(rows({"plain": 1.0, "auto": 1.0}, "near_tie"))) == "0 of 4, 4 near ties"
    assert "4 WRONG" in EQUAL.text(outcome(rows({"plain": 1.0, "auto": 1.0}, "error")))
    assert EQUAL.text(outcome(rows({"plain": 1.0, "auto": 1.0}, NOT_COMPARED))) == "0 of 0"


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
    assert part.is_current(found)
    assert not part.is_current(part.outcome(tmp_path, part.command(count=3), "now"))
    found.write(tmp_path / "outcomes")
    [again] = read_outcomes(tmp_path / "outcomes")[part.name]
    assert again.rows == found.rows


def test_one_parts_failure_loses_no_other_and_few_prompts_keep_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "provide", lambda *_: [])
    monkeypatch.setattr(command, "OUTCOMES", tmp_path / "outcomes")
    monkeypatch.setattr(command, "QUICK", tmp_path / "quick.md")
    monkeypatch.setattr(command, "write", lambda: None)

    def measure(part: Part, count: int | None) -> Outcome:
        if part.name == "bf16":
            raise UserError("failed with 3: python")
        return outcome(rows({"plain": 2.0, "auto": 1.0}), part.name)

    monkeypatch.setattr(command, "measure", measure)
    some = [part for part in PARTS if part.name in ("off-grid", "bf16", "transformers")]
    assert command.measure_all(some, 3) == ["bf16: failed with 3: python"]
    assert read_outcomes(tmp_path / "outcomes") == {}
    assert "**2.00**" in (tmp_path / "quick.md").read_text()
    assert command.measure_all(some, None) == ["bf16: failed with 3: python"]
    assert set(read_outcomes(tmp_path / "outcomes")) == {"off-grid", "transformers"}


def test_a_part_names_all_that_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    part = next(part for part in PARTS if part.name == "q8-0")
    assert list(part.missing) == ["build/llama.cpp/bin/llama-server", "build/qwen-Q8_0.gguf"]
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / "qwen-Q8_0.gguf").touch()
    assert list(part.missing) == ["build/llama.cpp/bin/llama-server"]


def test_a_kind_of_machine_has_its_latest_outcome() -> None:
    older, newer, *_ = (digest for digest, told in GENERATIONS.items() if told == "Zen 3")
    latest = outcome(processor=f"AMD EPYC ({newer})")
    other = outcome(processor="A CPU (123abc)")
    found = machines([latest, outcome(processor=f"AMD EPYC ({older})"), other])
    assert list(found.items()) == [("A CPU", other), ("AMD EPYC Zen 3", latest)]


def test_the_committed_page_has_the_figures_of_the_committed_outcomes() -> None:
    written = PAGE.read_text(encoding="utf-8")
    outcomes = read_outcomes(OUTCOMES)
    assert set(outcomes) <= {part.name for part in PARTS}
    assert "{:.0f} to {:.0f} minutes".format(*minutes(outcomes)) in written
    mend = "run python -m bench.benchmarks --page, and delete outcomes that later ones of such a machine replace"
    for part in PARTS:
        for each in outcomes.get(part.name, []):
            for figure in part.figures:
                assert figure.text(each) in written, f"{part.name}: {figure.key}; {mend}"
