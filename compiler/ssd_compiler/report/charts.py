"""Charts as SVG, without scripts: lines, dots and intervals in a frame with labelled axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

COLOURS = ("#2f6fb2", "#d1495b", "#3a8f6b", "#e09f3e", "#7b5ea7", "#5c6b7a", "#c46fa0", "#2aa5a0", "#8a6d3b", "#9bb44d")
"""Colours of series, told apart by most people who see few colours; repeated after the last."""
Point = tuple[float, float]


def colour(index: int) -> str:
    """The colour of a series."""
    return COLOURS[index % len(COLOURS)]


@dataclass(slots=True)
class Chart:
    """A frame of `width` x `height` pixels over the range `x` by `y` of values, y upward."""

    title: str
    x: tuple[float, float]
    y: tuple[float, float]
    x_label: str = ""
    y_label: str = ""
    width: int = 380
    height: int = 240
    log_x: bool = False
    x_ticks: Sequence[float] = ()
    y_ticks: Sequence[float] = ()
    y_names: Sequence[str] = ()
    """Names in place of numbers at `y_ticks`."""
    left: int = 56
    """Pixels for what stands at the left of the plotted area."""
    parts: list[str] = field(default_factory=list)

    def line(self, points: Sequence[Point], stroke: str, name: str = "", dashed: bool = False) -> None:
        """Join points; `name` is shown where the pointer rests."""
        places = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(self._place, points))
        dash = ' stroke-dasharray="4 4"' if dashed else ""
        self.parts.append(
            f'<polyline points="{places}" fill="none" stroke="{stroke}" stroke-width="2"{dash}>{_hint(name)}</polyline>'
        )

    def dot(self, point: Point, fill: str, name: str = "", radius: float = 4.0) -> None:
        """Mark a point."""
        x, y = self._place(point)
        self.parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" fill="{fill}" fill-opacity=".85">{_hint(name)}</circle>'
        )

    def render(self) -> str:
        """The figure with its title."""
        left, top, right, bottom = self._frame
        grid = [
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}" class="grid"/>'
            f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{value:g}</text>'
            for value in self.x_ticks
            for x in [self._place((value, self.y[0]))[0]]
        ]
        grid += [
            f'<line x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>'
            f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{escape(name)}</text>'
            for value, name in zip(self.y_ticks, self.y_names or map("{:g}".format, self.y_ticks), strict=True)
            for y in [self._place((self.x[0], value))[1]]
        ]
        labels = (
            f'<text x="{(left + right) / 2:.0f}" y="{self.height - 4}" text-anchor="middle">'
            f"{escape(self.x_label)}</text>"
            f'<text x="{left}" y="{top - 8}">{escape(self.y_label)}</text>'
        )
        return (
            f'<figure><figcaption>{escape(self.title)}</figcaption><svg viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}" role="img" aria-label="{escape(self.title, quote=True)}">'
            f"{''.join(grid)}{labels}{''.join(self.parts)}</svg></figure>"
        )

    @property
    def _frame(self) -> tuple[int, int, int, int]:
        """Left, top, right and bottom of the plotted area."""
        return self.left, 24, self.width - 14, self.height - 40

    def _place(self, point: Point) -> Point:
        left, top, right, bottom = self._frame
        across = _share(point[0], self.x, self.log_x)
        up = _share(point[1], self.y)
        return left + across * (right - left), bottom - up * (bottom - top)


def legend(names: Sequence[tuple[str, str]]) -> str:
    """Names beside their colours."""
    items = "".join(f'<span><i style="background:{fill}"></i>{escape(name)}</span>' for name, fill in names)
    return f'<p class="legend">{items}</p>'


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers between two."""
    span = high - low
    if not span > 0:
        return [low]
    step = 10.0 ** math.floor(math.log10(span / count))
    step = min((step * factor for factor in (1, 2, 5, 10)), key=lambda each: abs(span / each - count))
    first = math.ceil(low / step - 1e-9)
    return [round(number * step, 12) for number in range(first, math.floor(high / step + 1e-9) + 1)]


def powers(low: float, high: float, base: float = 10.0) -> list[float]:
    """Powers of a base between two positive numbers."""
    first = math.ceil(math.log(low, base) - 1e-9)
    last = math.floor(math.log(high, base) + 1e-9)
    return [base**number for number in range(first, last + 1)]


def _share(value: float, bounds: tuple[float, float], logarithmic: bool = False) -> float:
    low, high = bounds
    if logarithmic:
        low, high, value = math.log(low), math.log(high), math.log(max(value, 1e-30))
    share = (value - low) / (high - low) if high > low else 0.5
    return min(max(share, -0.05), 1.05)


def _hint(name: str) -> str:
    return f"<title>{escape(name)}</title>" if name else ""
