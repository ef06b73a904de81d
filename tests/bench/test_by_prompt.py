"""A comparison read prompt by prompt, and the stream that is meant to be hard."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from bench.fixtures.adversarial import adversarial
from bench.harness.ledger import Row, read_rows
from bench.harness.standings import against
from bench.studies.by_prompt import halves, speedups
from ssd_profiles.errors import UserError


def row(prompt: str, contender: str, seconds: float, repeat: int = 0, counted: int = 10) -> Row:
    return Row(prompt, "all", contender, repeat, "none", counted, 0.1, seconds, counted)


ROWS = [
    *(row(prompt, "plain", 2.0, repeat) for prompt in "abc" for repeat in range(3)),
    *(row("a", "auto", seconds, repeat) for repeat, seconds in enumerate((1.0, 2.0, 8.0))),
    *(row("b", "auto", 1.0, repeat, counted=5) for repeat in range(3)),
    *(row("c", "auto", 4.0, repeat) for repeat in range(3)),
]


def test_a_prompt_counts_once_by_its_median_and_by_time_per_token() -> None:
    assert speedups(ROWS, "plain", "auto") == {"a": 1.0, "b": 1.0, "c": 0.5}


def test_repeats_make_an_interval_no_narrower() -> None:
    again = [*ROWS, *(Row(**{**asdict(each), "repeat": each.repeat + 3}) for each in ROWS)]
    assert against(again, "plain", "auto") == pytest.approx(against(ROWS, "plain", "auto"))


def test_halves_go_by_the_place_in_the_stream() -> None:
    rows = [row(f"{place}-{name}", "plain", 1.0) for place, name in ((0, "a"), (7, "b-1"), (12, "c"))]
    assert [each.category for each in halves(rows)] == ["served tuning", "held back", "served tuning"]
    for others in (ROWS, [row("81", "plain", 1.0), row("82", "plain", 1.0)]):
        with pytest.raises(UserError, match="--halves"):
            halves(others)


def test_rows_are_read_back_and_other_files_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(["{}", *(json.dumps(asdict(each)) for each in ROWS)]) + '\n{"prompt": "cut of')
    assert read_rows(path) == ROWS
    for broken in ("", '{}\n{"a": 1}'):
        path.write_text(broken)
        with pytest.raises(UserError, match="no rows"):
            read_rows(path)


def test_the_hard_stream_takes_its_kinds_by_turns(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": f"some words {i} to shuffle"}) for i in range(4)))
    stream = adversarial(path, 3)
    assert [prompt.category for prompt in stream] == ["random text", "shuffled words", "two languages"] * 3
    assert sorted(stream[1].turns[0].split()) == sorted(["some", "words", "0", "to", "shuffle"])
    assert adversarial(path, 3) == stream
    assert adversarial(path, 3, seed=1) != stream
