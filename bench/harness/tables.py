"""Comparisons as tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

DECODING = "Speed of decoding (prefill left out)"


def show(found: dict[str, Any], plain: str, baselines: Sequence[str], console: Console, title: str = DECODING) -> None:
    """Print speed against each baseline, then against plain decoding by category."""
    table = Table(title=title)
    for column in ("", "tokens/s", *(f"÷ {base}" for base in baselines), "M", "α", "identical", "first token"):
        table.add_column(column, justify="left" if not column else "right", no_wrap=True)
    for name, figures in found.items():
        each = figures["overall"]
        table.add_row(
            name,
            f"{each['tokens_per_second']:.1f}" if each["tokens_per_second"] else "–",
            *(with_interval(each["against"].get(base)) for base in baselines),
            f"{each['mean_acceptance_length']:.2f}" if "mean_acceptance_length" in each else "–",
            f"{each['draft_acceptance_rate']:.2f}" if "draft_acceptance_rate" in each else "–",
            sameness(each),
            f"{each['first_seconds']:.2f} s",
        )
    console.print(table)
    for name, figures in found.items():
        each = figures["overall"]
        if "verify_cost" in each:
            drafted = each["share_of_tokens_drafted"]
            expected = each["expected_speedup_with_verification"]
            console.print(
                f"{name}: c {each['draft_cost']:.3f}, v {each['verify_cost']:.3f}; "
                f"E(Spd) {each['expected_speedup']:.3f}, with v {expected:.3f}; {drafted:.0%} of tokens drafted; "
                f"planning {each['share_planning']:.1%} of time"
            )
    by_category = Table(title=f"÷ {plain}, by category")
    names = [name for name in found if name != plain]
    for column in ("", *names):
        by_category.add_column(column, justify="right" if column else "left", no_wrap=True)
    for category in next(iter(found.values()))["categories"]:
        ratios = [found[name]["categories"][category]["against"][plain] for name in names]
        by_category.add_row(category, *(f"{ratio['speedup']:.2f}" if ratio else "–" for ratio in ratios))
    console.print(by_category)


def with_interval(ratio: dict[str, float] | None) -> str:
    """Format a speed-up with its interval."""
    return f"{ratio['speedup']:.2f}{interval(ratio)}" if ratio else "–"


def interval(ratio: dict[str, float]) -> str:
    """Format the interval that follows a speed-up; empty for a single prompt."""
    return f" ({ratio['low']:.2f}–{ratio['high']:.2f})" if "low" in ratio else ""


def sameness(figures: dict[str, Any]) -> str:
    """Format how many outputs equal plain decoding's."""
    if not figures["compared"]:
        return "not compared"
    ties = f", {figures['near_tie']} near ties" if figures["near_tie"] else ""
    wrong = f", {figures['error']} WRONG" if figures["error"] else ""
    return f"{figures['identical']} of {figures['compared']}{ties}{wrong}"
