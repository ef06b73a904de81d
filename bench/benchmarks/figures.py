"""Figures of a part: each has a key, by which texts quote it, and a label, under which the page lists it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.harness.ledger import NOT_COMPARED, Row
from bench.harness.outcomes import Outcome
from bench.harness.standings import against
from bench.harness.tables import with_interval
from bench.llama_cpp import LLAMA

NOT_OURS = ("plain", "transformers", LLAMA)
"""Beginnings of the names of contenders that draft nothing, or are peers."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure of an outcome as text, which is empty if the outcome lacks what it is about."""

    label: str
    key: str
    text: Callable[[Outcome], str]


def ratio(label: str, name: str, base: str, category: str | None = None, bold: bool = False) -> Figure:
    """Speed of one contender ÷ speed of another, with its 95% interval; its key is for instance `auto/plain`."""
    key = f"{name}/{base}" + (f" {category}" if category else "")
    return Figure(label, key, lambda outcome: _ratio(_rows(outcome, category), base, name, bold))


def rate(label: str, name: str, category: str | None = None) -> Figure:
    """Tokens per second of a contender; its key is for instance `plain tokens/s`."""
    key = f"{name} tokens/s" + (f" {category}" if category else "")
    return Figure(label, key, lambda outcome: _rate(_rows(outcome, category), name))


def peer(label: str, name: str) -> Figure:
    """Tokens per second of a contender, and the speed of `auto` ÷ its speed, such as `18.1; 1.35 (1.19–1.52)`."""

    def text(outcome: Outcome) -> str:
        found = _rate(outcome.rows, name)
        return f"{found}; {_ratio(outcome.rows, name, 'auto')}" if found else ""

    return Figure(label, f"auto/{name}, and tokens/s", text)


def fastest(label: str, category: str | None = None) -> Figure:
    """Speed of `auto` ÷ speed of llama.cpp's fastest setting by total tokens/s, with or without its speculation."""

    def text(outcome: Outcome) -> str:
        rows = _rows(outcome, category)
        peers = sorted({row.contender for row in rows if row.contender.startswith(LLAMA)})
        return _ratio(rows, max(peers, key=lambda name: _speed(rows, name)), "auto", bold=True) if peers else ""

    return Figure(label, "auto/fastest" + (f" {category}" if category else ""), text)


def _equal(outcome: Outcome) -> str:
    """For instance `52 of 52`; near ties and wrong outputs are added if there are any."""
    ours = [row for row in outcome.rows if not row.contender.startswith(NOT_OURS)]
    kinds = [row.divergence for row in ours if row.divergence != NOT_COMPARED]
    ties = f", {kinds.count('near_tie')} near ties" if "near_tie" in kinds else ""
    wrong = f", {kinds.count('error')} WRONG" if "error" in kinds else ""
    return f"{kinds.count('none')} of {len(kinds)}{ties}{wrong}"


def _size(outcome: Outcome) -> str:
    return f"{len({row.prompt for row in outcome.rows})} × {(outcome.settings or {})['max_new_tokens']}"


FASTEST = fastest("`auto` ÷ llama.cpp's fastest setting")
EQUAL = Figure("outputs equal to plain decoding's", "identical", _equal)
"""Number of outputs with drafts of ours that are plain decoding's, and of all that can be compared."""
SIZE = Figure("prompts × tokens", "size", _size)
"""Number of prompts that figures are over, and most new tokens of each, such as `13 × 48`."""


def _rows(outcome: Outcome, category: str | None) -> list[Row]:
    """An outcome's rows, or those of one category."""
    return [row for row in outcome.rows if category is None or row.category == category]


def _ratio(rows: Sequence[Row], base: str, name: str, bold: bool = False) -> str:
    found = against(rows, base, name)
    if found is None:
        return ""
    shown, brackets, interval = with_interval(found).partition(" (")
    return (f"**{shown}**" if bold else shown) + brackets + interval


def _rate(rows: Sequence[Row], name: str) -> str:
    speed = _speed(rows, name)
    return f"{speed:.1f}" if speed else ""


def _speed(rows: Sequence[Row], name: str) -> float:
    """Tokens per second of a contender; 0 without rows of it."""
    mine = [row for row in rows if row.contender == name]
    seconds = sum(row.seconds for row in mine)
    return sum(row.counted for row in mine) / seconds if seconds else 0.0
