"""Figures of a part: each has a key, by which texts quote it, and a label, under which the page lists it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.harness.ledger import NOT_COMPARED, Row
from bench.harness.outcomes import Outcome
from bench.harness.standings import against
from bench.harness.tables import with_interval
from bench.llama_cpp import LLAMA

NOT_OURS = ("plain", "transformers", LLAMA)
"""Beginnings of the names of contenders that draft nothing, or are peers."""


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
        return _ratio(rows_of(outcome, self.category), self.base, self.name, self.bold)


def _ratio(rows: Sequence[Row], base: str, name: str, bold: bool) -> str:
    ratio = against(rows, base, name)
    if ratio is None:
        return ""
    shown, brackets, interval = with_interval(ratio).partition(" (")
    return (f"**{shown}**" if bold else shown) + brackets + interval


@dataclass(frozen=True, slots=True)
class Peer:
    """Tokens per second of a contender, and the speed of `auto` ÷ its speed."""

    label: str
    name: str

    @property
    def key(self) -> str:
        """For instance `auto/llama.cpp ngram-mod, and tokens/s`."""
        return f"auto/{self.name}, and tokens/s"

    def text(self, outcome: Outcome) -> str:
        """For instance `18.1; 1.35 (1.19–1.52)`; empty if an outcome lacks the contender."""
        rate = Rate("", self.name).text(outcome)
        return f"{rate}; {_ratio(outcome.rows, self.name, 'auto', bold=False)}" if rate else ""


@dataclass(frozen=True, slots=True)
class Fastest:
    """Speed of `auto` ÷ speed of llama.cpp's fastest setting by total tokens/s, with or without its speculation."""

    label: str = "`auto` ÷ llama.cpp's fastest setting"
    key: str = "auto/fastest"

    def text(self, outcome: Outcome) -> str:
        """The figure of an outcome; empty if it lacks llama.cpp."""
        rates = {
            name: each["overall"]["tokens_per_second"] or 0.0
            for name, each in outcome.standings.items()
            if name.startswith(LLAMA)
        }
        return _ratio(outcome.rows, max(rates, key=lambda name: rates[name]), "auto", bold=True) if rates else ""


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
    """Number of outputs with drafts of ours that are plain decoding's, and of all that can be compared."""

    label: str = "outputs equal to plain decoding's"
    key: str = "identical"

    def text(self, outcome: Outcome) -> str:
        """For instance `52 of 52`; near ties and wrong outputs are added if there are any."""
        ours = [row for row in outcome.rows if not row.contender.startswith(NOT_OURS)]
        rows = [row for row in ours if row.divergence != NOT_COMPARED]
        kinds = [row.divergence for row in rows]
        ties = f", {kinds.count('near_tie')} near ties" if "near_tie" in kinds else ""
        wrong = f", {kinds.count('error')} WRONG" if "error" in kinds else ""
        return f"{kinds.count('none')} of {len(kinds)}{ties}{wrong}"


@dataclass(frozen=True, slots=True)
class Size:
    """Number of prompts that a figure is over, and most new tokens of each."""

    label: str = "prompts × tokens"
    key: str = "size"

    def text(self, outcome: Outcome) -> str:
        """For instance `13 × 48`."""
        return f"{len({row.prompt for row in outcome.rows})} × {(outcome.settings or {})['max_new_tokens']}"


Figure = Ratio | Fastest | Rate | Peer | Equal | Size
