"""Charts of comparisons: speed-ups with intervals, scatter plots and staircases."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COLOURS = ("#1f6feb", "#d1242f", "#2da44e", "#9a6700", "#8250df", "#57606a", "#bf3989", "#0a7ea4", "#7ab51d", "#e8833a")
BY_STRATEGY = {
    "auto": "#1f6feb",
    "lookup": "#2da44e",
    "light": "#e8833a",
    "knn": "#8250df",
    "fixed": "#b392f0",
    "knapsack": "#bf3989",
    "clasp": "#d1242f",
    "swift": "#9a6700",
    "exit": "#0a7ea4",
    "del": "#7ab51d",
    "plain again": "#57606a",
    "transformers": "#24292f",
    "transformers-lookup": "#8c959f",
}
"""The colour of each strategy, of plain decoding and of peers, the same in every picture."""
MOST_BY_CATEGORY = len(COLOURS)


def colours(names: Sequence[str]) -> list[str]:
    """A colour per contender: its strategy's, or one that no other has where the strategy's is taken."""
    wanted = [BY_STRATEGY.get(name, BY_STRATEGY.get(_strategy(name))) for name in names]
    spare = [colour for colour in COLOURS if colour not in wanted] or list(COLOURS)
    taken: list[str] = []
    for place, colour in enumerate(wanted):
        free = colour is not None and colour not in taken
        taken.append(colour if free and colour is not None else spare[place % len(spare)])
    return taken


def _strategy(name: str) -> str:
    return name.removeprefix("single:").partition("+")[0].partition(":")[0]


@dataclass(frozen=True, slots=True)
class Labels:
    """The texts of a picture."""

    title: str
    """The model's name."""
    across: str
    up: str


def draw(found: dict[str, Any], baseline: str, title: str, folder: Path) -> list[Path]:
    """Draw speed-ups with intervals as speed.png and speed.svg. Returns no paths without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return []
    names = [name for name in found if name != baseline]
    categories = list(next(iter(found.values()))["categories"])
    # Too many contenders to tell apart within a category get a row each instead.
    many = len(names) > MOST_BY_CATEGORY
    rows = names if many else ["overall", *categories]
    figure = Figure(figsize=(9, 1.2 + (0.35 if many else 0.5) * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    for number, (name, colour) in enumerate(zip(names, colours(names), strict=True)):
        figures = [found[name]["overall"], *(found[name]["categories"].values() if not many else ())]
        shift = number if many else 0.7 * ((number + 0.5) / len(names) - 0.5)
        points = [(row + shift, each["against"][baseline]) for row, each in enumerate(figures)]
        points = [(y, ratio) for y, ratio in points if ratio is not None]
        axes.errorbar(
            [ratio["speedup"] for _, ratio in points],
            [y for y, _ in points],
            xerr=[
                [max(0.0, ratio["speedup"] - ratio.get("low", ratio["speedup"])) for _, ratio in points],
                [max(0.0, ratio.get("high", ratio["speedup"]) - ratio["speedup"]) for _, ratio in points],
            ],
            fmt="o",
            markersize=4,
            linewidth=1.2,
            color=BY_STRATEGY.get(_strategy(name), colour) if many else colour,
            label=name,
        )
    axes.axvline(1.0, color="#57606a", linewidth=1)
    # Parameters go on a second line, because long names would shrink the plot.
    axes.set_yticks(range(len(rows)), [row.replace("+", "\n+", 1) for row in rows], fontsize=9)
    axes.invert_yaxis()
    axes.grid(axis="x", color="#d0d7de", linewidth=0.6)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_xlabel(f"times the speed of {baseline} (95% interval over prompts)")
    axes.set_title(title, loc="left", fontsize=10)
    if not many:
        figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    return saved(figure, folder / "speed")


def points(series: Mapping[str, tuple[Sequence[float], Sequence[float]]], labels: Labels, path: Path) -> list[Path]:
    """Draw scatter plots with the diagonal as `path`.png and .svg. Returns no paths without matplotlib."""
    values = [value for x, y in series.values() for value in (*x, *y)]

    def paint(axes: Any) -> None:
        for (name, (x, y)), colour in zip(series.items(), colours(list(series)), strict=True):
            axes.scatter(x, y, s=18, color=colour, label=name, alpha=0.8)
        axes.plot([min(values), max(values)], [min(values), max(values)], color="#57606a", linewidth=1)

    return _painted(paint, 6, 5, labels, path)


def stairs(series: Mapping[str, Sequence[tuple[float, float]]], labels: Labels, path: Path) -> list[Path]:
    """Draw staircases of values [(x, y), ...], each held until the next. Returns no paths without matplotlib."""

    def paint(axes: Any) -> None:
        for (name, steps), colour in zip(series.items(), colours(list(series)), strict=True):
            axes.step(*zip(*steps, strict=True), where="post", color=colour, label=name)
        axes.axhline(1.0, color="#57606a", linewidth=1)

    return _painted(paint, 7, 3.6, labels, path)


def _painted(paint: Callable[[Any], None], width: float, height: float, labels: Labels, path: Path) -> list[Path]:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return []
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    paint(axes)
    axes.set_xlabel(labels.across)
    axes.set_ylabel(labels.up)
    axes.set_title(labels.title, loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    return saved(figure, path)


def saved(figure: Any, path: Path) -> list[Path]:
    """Save a figure as `path`.png and .svg."""
    path.parent.mkdir(parents=True, exist_ok=True)
    paths = [path.with_suffix(".png"), path.with_suffix(".svg")]
    for each in paths:
        figure.savefig(each, dpi=130)
    return paths
