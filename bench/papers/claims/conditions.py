"""Parts of claims: conditions on our outcomes, and texts of our figures."""

from __future__ import annotations

from collections.abc import Callable

from bench.papers.parts import HALF, SPECBOUND
from bench.papers.scoreboard import Look, NotMeasuredError

PLANTED, REAL = "planted05", "demo"
SAMPLED = "sampled"
"""Some strategies on the planted model at temperature 1, by price."""


def over(first: str, second: str, *parts: str) -> tuple[Callable[[Look], bool], ...]:
    """Conditions that one contender is faster than another, one for each part."""
    return tuple(lambda look, part=part: look(part, first) > look(part, second) for part in parts)


def paired(first: str, second: str, part: str) -> Callable[[Look], bool]:
    """The condition that a contender is faster than another on the same prompts, by the whole interval of the ratio."""
    return lambda look: look.ratio(part, first, second, "low") > 1.0


def least(contender: str, speedup: float, *parts: str) -> tuple[Callable[[Look], bool], ...]:
    """Conditions that a contender reaches a speed-up, one for each part."""
    return tuple(lambda look, part=part: look(part, contender) >= speedup for part in parts)


def both(contender: str) -> Callable[[Look], str]:
    """A contender's speed on the planted and on the real model."""
    return lambda look: f"{look(PLANTED, contender):.2f} planted, {look(REAL, contender):.2f} real"


def several(part: str, *contenders: str, figure: str = "speedup") -> Callable[[Look], str]:
    """A figure of some contenders of one part, in their order."""

    def short(name: str) -> str:
        for own in (HALF, SPECBOUND):
            name = name.replace(f"exit+{own}", "the paper's parameters").replace("the paper's parameters+", "")
        return name

    def shown(look: Look, name: str) -> str:
        return f"{short(name)} {if_measured(lambda: f'{look(part, name, figure):.2f}')}"

    return lambda look: ", ".join(shown(look, name) for name in contenders)


def if_measured(text: Callable[[], str], otherwise: str = "–") -> str:
    """A text of our figures, or `otherwise` if one of them is missing."""
    try:
        return text()
    except NotMeasuredError:
        return otherwise
