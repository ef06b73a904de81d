"""The rows of a comparison on disk, which make it resumable: one JSON line per prompt, contender and repeat."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.harness.provenance import commit
from ssd_artifacts.files import write_atomically
from ssd_profiles.errors import UserError

NOT_COMPARED = "not compared"
NAME = "rows.jsonl"
"""File name of a comparison's rows."""


@dataclass(frozen=True, slots=True)
class Row:
    """The result of one contender on one prompt."""

    prompt: str
    category: str
    contender: str
    repeat: int
    divergence: str
    """Divergence from plain decoding: `none`, `near_tie`, `error` or `NOT_COMPARED`."""
    tokens: int
    first_seconds: float
    seconds: float
    counted: int
    cycles: dict[str, float] = field(default_factory=dict)
    commit: str | None = None
    """Commit at which it was measured."""
    stolen: float | None = None
    """Share of the processors' time that other guests of the machine took while all contenders decoded the prompt."""


def read_comparison(path: Path) -> tuple[dict[str, Any], list[Row]]:
    """Read the settings and all rows of a comparison, finished or not. A last line that a kill cut short is left out.

    Raises UserError if the file cannot be read.
    """
    try:
        *lines, last = path.read_text(encoding="utf-8").splitlines()
        with suppress(ValueError):
            json.loads(last)
            lines.append(last)
        return json.loads(lines[0]), [Row(**json.loads(line)) for line in lines[1:]]
    except (OSError, ValueError, TypeError, IndexError) as error:
        raise UserError(f"{path}: holds no comparison ({error}); delete it to begin afresh") from None


def stolen_share(rows: Sequence[Row]) -> float | None:
    """Share of the processors' time that other guests took, over all rows; None if it was not counted."""
    counted = [row for row in rows if row.stolen is not None]
    seconds = sum(row.seconds for row in counted)
    return sum(row.seconds * (row.stolen or 0.0) for row in counted) / seconds if seconds else None


def commits_of(rows: Sequence[Row]) -> str | None:
    """Commits of the rows; there are several if the comparison was resumed after a change."""
    return ", ".join(dict.fromkeys(row.commit for row in rows if row.commit)) or None


def write_rows(path: Path, settings: Mapping[str, Any], rows: Sequence[Row]) -> None:
    """Write a whole comparison, as `read_comparison` reads it."""
    lines = [json.dumps(settings), *(json.dumps(asdict(row)) for row in rows)]
    write_atomically(path, "\n".join(lines) + "\n")


class Ledger:
    """Rows of one comparison, all measured with the same settings."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        """Open or create the file. Raises UserError when it holds rows of other settings."""
        self._path = path
        self._commit = commit()
        self.rows = list[Row]()
        if path.exists():
            known, rows = read_comparison(path)
            if known != json.loads(json.dumps(settings)):
                raise UserError(f"{path}: of other settings; give another --out, or delete it to begin afresh")
            # A kill may leave a partial line, or a prompt without some contenders. Both are measured again.
            found = Counter((row.prompt, row.repeat) for row in rows)
            whole = len(settings["contenders"])
            self.rows = [row for row in rows if found[row.prompt, row.repeat] == whole]
        write_rows(path, settings, self.rows)

    def has(self, prompt: str, repeat: int) -> bool:
        """Whether the rows of a prompt exist."""
        return any(row.prompt == prompt and row.repeat == repeat for row in self.rows)

    def add(self, rows: list[Row], stolen: float | None = None) -> None:
        """Append all rows of a prompt at once, because they were measured in turn and belong together."""
        stamped = [replace(row, commit=self._commit, stolen=stolen) for row in rows]
        with self._path.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(asdict(row)) + "\n" for row in stamped))
        self.rows += stamped
