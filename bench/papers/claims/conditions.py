"""Parts of claims: conditions on our outcomes, and texts of our figures."""

from __future__ import annotations

import re
from collections.abc import Callable

from bench.papers.parts.comparisons import HALF, SPECBOUND
from bench.papers.scoreboard import Look, NotMeasuredError

PLANTED, REAL = "planted05", "demo"
SAMPLED = "sampled"
"""Some strategies on the planted model at temperature 1, by price."""

NUMBERS = {
    "TPT": ("tpt", r"KnapSpec\)\s+Pearson ([\d.]+)"),
    "agreement": ("tpt", r"agreement alone\s+Pearson ([\d.]+)"),
    "own mask": ("transfer", r"gsm8k +([\d.]+)"),
    "foreign mask": ("transfer", r"humaneval +([\d.]+)"),
    "Self-SD seconds": ("search-cost", r"(\d+) s for 1000"),
    "Self-SD times": ("search-cost", r": (\d+) times our search"),
    "Jaccard at 1": ("clasp", r"1: ([\d.]+)"),
    "Jaccard at 32": ("clasp", r"32: ([\d.]+)"),
    "last search": ("along-stream", r"(?m)\Aswift\n.*\n(?:.*%.*\n)*? *51- 60 +[\d.]+ +([\d.]+)%"),
    "programme": ("clasp", r"programme ([\d.]+)"),
    "brute force": ("clasp", r"best of all ([\d.]+)"),
    "random": ("clasp", r"random ([\d.]+)"),
    "CLaSp search": ("planning-cost", r"half of the layers.* ([\d.]+) plain"),
    "states at all": ("pruning", r"-1.00 +(\d+)"),
    "states at 0.5": ("pruning", r" 0.50 +(\d+)"),
    "agreement at all": ("pruning", r"-1.00(?: +[\d.]+){4} +([\d.]+)"),
    "agreement at 0.5": ("pruning", r" 0.50(?: +[\d.]+){4} +([\d.]+)"),
    "price of all": ("search-prices", r"(?m)^ +128 +\S+ +4 +([\d.]+)"),
    "price of 8": ("search-prices", r"(?m)^ +128 +\S+ +4 +[\d.]+ +[\d.]+ +[\d.]+ +([\d.]+)"),
    "CLaSp in parallel": ("search-prices", r"(?m)^ +90 +([\d.]+) +[\d.]+$"),
    "CLaSp one by one": ("search-prices", r"(?m)^ +90 +[\d.]+ +([\d.]+)$"),
    "1 cluster": ("cluster-counts", r"(?m)^ +1 +([\d.]+)"),
    "3 clusters": ("cluster-counts", r"(?m)^ +3 +([\d.]+)"),
    "5 clusters": ("cluster-counts", r"(?m)^ +5 +([\d.]+)"),
    "7 clusters": ("cluster-counts", r"(?m)^ +7 +([\d.]+)"),
    "later by all": ("search-states", r"(?m)^ +4 +all +[\d.]+ +[\d.]+ +([\d.]+)"),
    "later by 8": ("search-states", r"(?m)^ +4 +8 +[\d.]+ +[\d.]+ +([\d.]+)"),
    "programme on pairs": ("search-pairs", r"(?m)^knapsack +100 +\d+ +\d+ +([\d.]+)"),
    "both on pairs": ("search-pairs", r"(?m)^both +100 +\d+ +\d+ +([\d.]+)"),
    "programme on diffuse": ("search-diffuse", r"(?m)^knapsack +100 +\d+ +\d+ +([\d.]+)"),
    "both on diffuse": ("search-diffuse", r"(?m)^both +100 +\d+ +\d+ +([\d.]+)"),
    "closed form": ("exit-training", r"closed form.* ([\d.]+)   "),
    "after 20 epochs": ("exit-training", r"epochs: 20.* ([\d.]+)   "),
    "attention at 256": ("context-sweep", r"(?m)^ +256 .*% +(\d+)%"),
    "attention at 2048": ("context-sweep", r"(?m)^ +2048 .*% +(\d+)%"),
    "attention at 8000": ("context-sweep", r"(?m)^ +8000 .*% +(\d+)%"),
}
"""Numbers that tools print, as part and pattern."""


def number(look: Look, name: str) -> float:
    """One of `NUMBERS` in the latest outcome. Raises NotMeasuredError."""
    return look.printed(*NUMBERS[name])


def first_ten(look: Look, contender: str) -> float:
    """Speed of a contender of SWIFT's sweep in its first ten prompts. Raises NotMeasuredError."""
    return look.printed("along-sweep", rf"(?m)^{re.escape(contender)}\n.*\n +1- 10 +[\d.]+ +[\d.]+% +([\d.]+)")


def over(first: str, second: str, *parts: str) -> tuple[Callable[[Look], bool], ...]:
    """Conditions that one contender is faster than another, one for each part."""
    return tuple(lambda look, part=part: look(part, first) > look(part, second) for part in parts)


def paired(first: str, second: str, part: str) -> Callable[[Look], bool]:
    """The condition that a contender is faster than another on the same prompts, by the whole interval of the ratio.

    Outcomes without rows have no ratio: there the lower end of its own interval has to be above the other's speed.
    """

    def holds(look: Look) -> bool:
        try:
            return look.ratio(part, first, second, "low") > 1.0
        except NotMeasuredError:
            return look(part, first, "low") > look(part, second)

    return holds


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
