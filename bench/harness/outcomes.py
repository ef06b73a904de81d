"""Outcomes of comparisons, kept in the repository: one JSON file per processor and part.

An outcome says with which code it was measured. When the packages change it becomes stale; it stays until the part is
measured again on that processor, whatever other parts are measured meanwhile.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from bench.harness.ledger import Row, commits_of, read_comparison, stolen_share
from bench.harness.standings import against, standings
from ssd_artifacts.files import write_atomically

OUTCOMES = Path("bench/papers/outcomes")
FIGURES = {"mean_acceptance_length": "M", "draft_acceptance_rate": "alpha", "share_planning": "planning"}
"""Short names of a contender's figures."""


def slug(processor: str) -> str:
    """A folder's name for a processor."""
    return "-".join(re.findall(r"[a-z0-9]+", processor.lower()))


@dataclass(frozen=True)
class Outcome:
    """The result of one part on one processor."""

    part: str
    processor: str
    origin: str
    """For readers: threads, torch and dtype."""
    packages: str | None = None
    """`packages_digest` of the code; None for outcomes from before it was recorded."""
    commit: str | None = None
    date: str = field(default_factory=lambda: datetime.now(UTC).date().isoformat())
    settings: Mapping[str, Any] | None = None
    """Settings of a comparison; an outcome of others counts as none."""
    rows: tuple[Row, ...] = ()
    known: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Figures by contender of an outcome without rows."""

    @cached_property
    def standings(self) -> dict[str, Any]:
        """Figures of all contenders, from the rows."""
        return standings(self.rows, ["plain"])

    @cached_property
    def figures(self) -> Mapping[str, Mapping[str, float]]:
        """Speed-up with interval and slowest prompt, and the figures of `FIGURES`, by contender."""
        if not self.rows:
            return self.known
        return {
            name: {**each["overall"]["against"]["plain"]}
            | {short: each["overall"][long] for long, short in FIGURES.items() if long in each["overall"]}
            for name, each in self.standings.items()
        }

    def against(self, base: str, name: str) -> dict[str, float] | None:
        """Speed of `name` ÷ speed of `base`, paired by prompt, with its interval; None without rows of both."""
        return against(self.rows, base, name)

    @property
    def stolen(self) -> float | None:
        """Share of the processors' time that other guests of the machine took; None if unknown."""
        return stolen_share(self.rows)

    def is_stale(self, packages: str) -> bool:
        """Whether the packages' code has changed since."""
        return self.packages != packages

    def write(self, folder: Path = OUTCOMES) -> None:
        """Write the file, in place of an earlier outcome of this part on this processor."""
        data = {
            key: value for key, value in asdict(self).items() if key in ("origin", "date") or (key != "rows" and value)
        }
        lines = [json.dumps(_compact(asdict(row)), separators=(",", ":")) for row in self.rows]
        text = json.dumps(data, indent=1, sort_keys=True)
        if lines:
            text = text[:-2] + ',\n "rows": [\n  ' + ",\n  ".join(lines) + "\n ]\n}"
        path = folder / slug(self.processor) / f"{self.part}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text + "\n")


def outcome_of_comparison(path: Path, part: str, packages: str, **more: Any) -> Outcome:
    """The outcome of the comparison in the file `path`; its settings have what is given as `more`, too."""
    settings, rows = read_comparison(path)
    device = settings["device"]
    return Outcome(
        part=part,
        processor=device["device"],
        origin=f"{device['threads']} threads, torch {device['torch']}, {device['dtype']}",
        packages=packages,
        commit=commits_of(rows),
        settings=settings | more,
        rows=tuple(rows),
    )


def read_outcomes(folder: Path = OUTCOMES) -> dict[str, list[Outcome]]:
    """All outcomes by part, those with known code first, the latest first."""
    found: dict[str, list[Outcome]] = {}
    for path in sorted(folder.glob("*/*.json")):
        data = json.loads(path.read_text(encoding="utf-8"))
        rows = tuple(Row(**row) for row in data.pop("rows", []))
        outcome = Outcome(**data, rows=rows)
        found.setdefault(outcome.part, []).append(outcome)
    return {
        part: sorted(some, key=lambda each: (each.packages is not None, each.date), reverse=True)
        for part, some in found.items()
    }


def outcome_of(found: Mapping[str, list[Outcome]], part: str, processor: str) -> Outcome | None:
    """A part's outcome on a processor."""
    return next((each for each in found.get(part, []) if slug(each.processor) == slug(processor)), None)


def _compact(value: Any) -> Any:
    """A row without what is empty, numbers to six digits."""
    if isinstance(value, dict):
        return {key: _compact(each) for key, each in value.items() if each is not None}
    return float(f"{value:.6g}") if isinstance(value, float) else value
