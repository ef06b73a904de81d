"""Claims of the papers, measurements of them here, and the verdicts that follow."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from bench.harness.outcomes import Outcome
from ssd_profiles.errors import UserError

ONCE = Path(__file__).parent / "measured_once.json"
"""Numbers that tools printed which have left the tree."""


class NotMeasuredError(UserError):
    """An outcome or a figure that a claim needs is missing."""


@cache
def measured_once() -> Mapping[str, Any]:
    """Measurements that were made once, by name: title, tool, processor, commit, date and numbers."""
    found: dict[str, Any] = json.loads(ONCE.read_text(encoding="utf-8"))
    return found


class Look:
    """Looks up figures in the latest outcome of each part."""

    def __init__(self, outcomes: Mapping[str, list[Outcome]]) -> None:
        self._outcomes = outcomes

    def __call__(self, part: str, contender: str, figure: str = "speedup") -> float:
        """A contender's figure in the part's latest outcome. Raises NotMeasuredError."""
        return self._figure(self._outcome(part), contender, figure)

    def among(self, part: str, first: int, last: int, contender: str, figure: str = "speedup") -> float:
        """A figure over the prompts `first` to `last` of the stream, counted from 1. Raises NotMeasuredError."""
        return self._figure(_among(self._outcome(part), first, last), contender, figure)

    def ratio(
        self, part: str, first: str, second: str, figure: str = "speedup", prompts: tuple[int, int] | None = None
    ) -> float:
        """Speed of one contender ÷ another's, paired by prompt, or its `low` or `high`. Raises NotMeasuredError.

        `prompts` are the numbers of the first and the last prompt of the stream that count; None for all.
        """
        outcome = self._outcome(part)
        found = (outcome if prompts is None else _among(outcome, *prompts)).against(second, first) or {}
        if figure not in found:
            raise NotMeasuredError(f"no {first} beside {second} in {part} yet")
        return found[figure]

    def number(self, name: str) -> float:
        """A number that was measured once. Raises NotMeasuredError."""
        for once in measured_once().values():
            if name in once["numbers"]:
                return float(once["numbers"][name])
        raise NotMeasuredError(f"no {name}")

    def _outcome(self, part: str) -> Outcome:
        if not self._outcomes.get(part):
            raise NotMeasuredError(f"{part}: not measured yet")
        return self._outcomes[part][0]

    def _figure(self, outcome: Outcome, contender: str, figure: str) -> float:
        figures = outcome.figures.get(contender, {})
        if figure not in figures:
            raise NotMeasuredError(f"no {contender} in {outcome.part} yet")
        return figures[figure]


def _among(outcome: Outcome, first: int, last: int) -> Outcome:
    """An outcome's prompts `first` to `last`, counted from 1."""
    prompts = list(dict.fromkeys(row.prompt for row in outcome.rows))[first - 1 : last]
    return replace(outcome, rows=tuple(row for row in outcome.rows if row.prompt in prompts))


@dataclass(frozen=True, slots=True)
class Claim:
    """One claim of a paper."""

    paper: str
    says: str
    """The claim, with its place in the paper."""
    reason: str
    """Why the verdict is what it is, for readers."""
    part: str = ""
    """The measurements that decide it, comma-separated."""
    ours: Callable[[Look], str] | str = "–"
    """Our own figures."""
    holds: tuple[Callable[[Look], bool], ...] = ()
    """Conditions of the verdict; none where it cannot be tried."""


def verdict(claim: Claim, look: Look) -> str:
    """Reproduced, partly, not, not tried or cannot be tried here, by the claim's conditions.

    A condition whose figures are missing does not hold; if they are missing for all, the claim was not tried.
    """
    if not claim.holds:
        return "cannot be tried here"
    held = [_held(condition, look) for condition in claim.holds]
    if all(each is None for each in held):
        return "not tried"
    return "**reproduced**" if all(held) else "partly" if any(held) else "not"


def _held(condition: Callable[[Look], bool], look: Look) -> bool | None:
    try:
        return condition(look)
    except NotMeasuredError:
        return None
