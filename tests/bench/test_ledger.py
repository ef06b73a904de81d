"""Rows of a comparison: they are read back, and repeats make no interval narrower."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from bench.harness.ledger import Row, read_rows
from bench.harness.standings import against
from ssd_profiles.errors import UserError


def row(prompt: str, contender: str, seconds: float, repeat: int) -> Row:
    return Row(prompt, "all", contender, repeat, "none", 10, 0.1, seconds, 10)


ROWS = [
    *(row(prompt, "plain", 2.0, repeat) for prompt in "abc" for repeat in range(3)),
    *(row("a", "auto", seconds, repeat) for repeat, seconds in enumerate((1.0, 2.0, 8.0))),
    *(row(prompt, "auto", 1.0, repeat) for prompt in "bc" for repeat in range(3)),
]


def test_repeats_make_an_interval_no_narrower() -> None:
    again = [*ROWS, *(Row(**{**asdict(each), "repeat": each.repeat + 3}) for each in ROWS)]
    assert against(again, "plain", "auto") == pytest.approx(against(ROWS, "plain", "auto"))


def test_rows_are_read_back_and_other_files_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(["{}", *(json.dumps(asdict(each)) for each in ROWS)]) + '\n{"prompt": "cut of')
    assert read_rows(path) == ROWS
    for broken in ("", '{}\n{"a": 1}'):
        path.write_text(broken)
        with pytest.raises(UserError, match="no rows"):
            read_rows(path)
