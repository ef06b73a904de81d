"""A comparison prompt by prompt: the slowest ones, the spread of speed-ups, and whether tuning has overfitted.

`python -m bench.studies.by_prompt build/compare60 --contender auto --halves` reads the results of `bench.compare` in a
folder; a prompt's speed-up is the median over its repeats. `--halves` separates the prompts of bench.studies.traces:
every other one, from the first on, served for tuning.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from bench.fixtures.bundles import model_title
from bench.harness.drawing.chart import Labels, histogram
from bench.harness.drawing.tables import with_interval
from bench.harness.ledger import NAME, Row, read_comparison_settings, read_rows
from bench.harness.standings import against, paired
from ssd_profiles.errors import UserError
from ssd_runtime.command import run_guarded

LOWEST = 5


def speedups(rows: Sequence[Row], base: str, name: str) -> dict[str, float]:
    """Speed-up of each prompt against `base`, the median over its repeats."""
    found = defaultdict[str, list[float]](list)
    for one, other in paired(rows, base, name):
        found[one.prompt].append(one.seconds / (other.seconds / other.counted * one.counted))
    return {prompt: median(ratios) for prompt, ratios in found.items()}


def halves(rows: Sequence[Row]) -> list[Row]:
    """Replace each row's category by its half, by the position that `mixed_stream` puts before the id.

    Raises UserError for ids without a position.
    """
    names = "served tuning", "held back"
    places = [re.match(r"(\d+)-", row.prompt) for row in rows]
    if None in places:
        raise UserError("--halves: the prompts are not those of bench.studies.traces; leave it out")
    return [replace(row, category=names[int(place[1]) % 2]) for row, place in zip(rows, places, strict=True) if place]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--contender", default="auto")
    parser.add_argument("--control", default="plain again")
    parser.add_argument("--base", default="plain")
    parser.add_argument("--halves", action="store_true")
    arguments = parser.parse_args()
    rows = read_rows(arguments.folder / NAME)
    settings = read_comparison_settings(arguments.folder / NAME)
    console = Console(highlight=False)
    names = arguments.contender, arguments.control
    table = Table(title=f"÷ {arguments.base}")
    for column in ("", "prompts", *names):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for group, members in _groups(rows, arguments.halves).items():
        ratios = [against(members, arguments.base, name) for name in names]
        table.add_row(group, str(len({row.prompt for row in members})), *(with_interval(ratio) for ratio in ratios))
    console.print(table)
    found = {name: each for name in names if (each := speedups(rows, arguments.base, name))}
    if arguments.contender not in found:
        raise UserError(f"--contender {arguments.contender}: not in {arguments.folder}")
    for name, each in found.items():
        lowest = sorted(each.items(), key=lambda item: item[1])[:LOWEST]
        console.print(f"{name}, slowest: " + ", ".join(f"{prompt} {ratio:.2f}" for prompt, ratio in lowest))
    path = arguments.folder / "by-prompt"
    series = {name: list(each.values()) for name, each in found.items()}
    labels = Labels(model_title(settings.get("name", "")), f"times the speed of {arguments.base}", "prompts")
    for picture in histogram(series, labels, path):
        print(f"picture: {picture}", file=sys.stderr)


def _groups(rows: Sequence[Row], with_halves: bool) -> Mapping[str, Sequence[Row]]:
    found = defaultdict[str, list[Row]](list)
    for row in [*(halves(rows) if with_halves else ()), *rows]:
        found[row.category].append(row)
    return {"all": rows} | {name: group for name, group in found.items() if name != "all"}


if __name__ == "__main__":
    run_guarded(main)
