"""Figures of a part: each has a key, by which texts quote it, and a label, under which the page lists it."""

from __future__ import annotations

from dataclasses import dataclass

from bench.harness.ledger import NOT_COMPARED, Row
from bench.harness.outcomes import Outcome
from bench.harness.standings import against
from bench.harness.tables import with_interval


def rows_of(outcome: Outcome, category: str | None) -> list[Row]:
    """An outcome's rows, or those of one category."""
    return [row for row in outcome.rows if category is None or row.category == category]


@dataclass(frozen=True, slots=True)
class Ratio:
    """Speed of one contender ÷ speed of another, with its 95% interval."""

    label: str
    name: str
    base: str
    category: str | None = None
    bold: bool = False

    @property
    def key(self) -> str:
        """For instance `auto/plain`."""
        return f"{self.name}/{self.base}" + (f" {self.category}" if self.category else "")

    def text(self, outcome: Outcome) -> str:
        """The figure of an outcome; empty if the outcome lacks one of the two."""
        ratio = against(rows_of(outcome, self.category), self.base, self.name)
        if ratio is None:
            return ""
        shown, brackets, interval = with_interval(ratio).partition(" (")
        return (f"**{shown}**" if self.bold else shown) + brackets + interval


@dataclass(frozen=True, slots=True)
class Rate:
    """Tokens per second of a contender."""

    label: str
    name: str
    category: str | None = None

    @property
    def key(self) -> str:
        """For instance `plain tokens/s`."""
        return f"{self.name} tokens/s" + (f" {self.category}" if self.category else "")

    def text(self, outcome: Outcome) -> str:
        """The figure of an outcome; empty if it lacks the contender."""
        rows = [row for row in rows_of(outcome, self.category) if row.contender == self.name]
        seconds = sum(row.seconds for row in rows)
        return f"{sum(row.counted for row in rows) / seconds:.1f}" if seconds else ""


@dataclass(frozen=True, slots=True)
class Equal:
    """Number of outputs that are plain decoding's, and of all that can be compared."""

    label: str = "outputs that are plain decoding's"
    key: str = "identical"

    def text(self, outcome: Outcome) -> str:
        """For instance `52 of 52`; near ties and wrong outputs are added if there are any."""
        rows = [row for row in outcome.rows if row.contender != "plain" and row.divergence != NOT_COMPARED]
        kinds = [row.divergence for row in rows]
        ties = f", {kinds.count('near_tie')} near ties" if "near_tie" in kinds else ""
        wrong = f", {kinds.count('error')} WRONG" if "error" in kinds else ""
        return f"{kinds.count('none')} of {len(kinds)}{ties}{wrong}"


@dataclass(frozen=True, slots=True)
class Size:
    """Number of prompts (or of rounds) that a figure is over."""

    label: str = "prompts"
    key: str = "prompts"

    def text(self, outcome: Outcome) -> str:
        """The number."""
        return str(len({row.prompt for row in outcome.rows}))


Figure = Ratio | Rate | Equal | Size
