"""Parts of claims: conditions on our outcomes, and texts of our figures."""

from __future__ import annotations

from collections.abc import Callable

from bench.papers.parts import HALF, SPECBOUND
from bench.papers.scoreboard import Look, NotMeasuredError

PLANTED, SMALL, REAL = "planted05", "demo", "qwen"
"""All strategies on the planted model, on the real one of 135M, and on the real one of 1.5B."""
SAMPLED, REAL_SAMPLED = "sampled", "qwen-sampled"
"""Some strategies at temperature 1, by price, on the planted model and on the real one."""


def over(first: str, second: str, *parts: str) -> tuple[Callable[[Look], bool], ...]:
    """Conditions that one contender is faster than another (`paired`), one for each part."""
    return tuple(paired(first, second, part) for part in parts)


def paired(first: str, second: str, part: str, prompts: tuple[int, int] | None = None) -> Callable[[Look], bool]:
    """The condition that a contender is faster than another on the same prompts, by the whole interval of the ratio.

    `prompts` are those of `Look.ratio`.
    """
    return lambda look: look.ratio(part, first, second, "low", prompts) > 1.0


def untried(look: Look) -> bool:
    """The condition of what was not tried here: with it, a claim is reproduced in part at most."""
    raise NotMeasuredError("not tried")


def least(contender: str, speedup: float, *parts: str) -> tuple[Callable[[Look], bool], ...]:
    """Conditions that a contender reaches a speed-up, one for each part."""
    return tuple(lambda look, part=part: look(part, contender) >= speedup for part in parts)


def on_all(contender: str) -> Callable[[Look], str]:
    """A contender's speed on the planted model and on both real ones."""
    return lambda look: (
        f"{look(PLANTED, contender):.2f} planted, {look(SMALL, contender):.2f} at 135M, {look(REAL, contender):.2f} at "
        "1.5B"
    )


def speeds(look: Look, part: str, *contenders: str) -> str:
    """The speeds of some contenders of one part, in their order."""
    return ", ".join(f"{look(part, name):.2f}" for name in contenders)


def interval(look: Look, part: str, first: str = "knn", second: str = "fixed:mix") -> str:
    """A contender ÷ another, paired by prompt, with its interval."""
    ratio, low, high = (look.ratio(part, first, second, each) for each in ("speedup", "low", "high"))
    return f"{ratio:.2f} ({low:.2f} to {high:.2f})"


def by_model(*contenders: str) -> Callable[[Look], str]:
    """Some contenders' speeds on the planted model, then on the real one of 1.5B."""
    return lambda look: f"{several(PLANTED, *contenders)(look)} planted; {several(REAL, *contenders)(look)} at 1.5B"


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
