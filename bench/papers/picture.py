"""The picture of docs/papers.md: speed by skipped layers against the model's size, the papers' figures and ours."""

from __future__ import annotations

from collections.abc import Mapping
from math import log10

PICTURE = "pictures/skipping-by-size.svg"
"""The path from the page's folder."""
PUBLISHED: Mapping[str, Mapping[float, float]] = {
    "KnapSpec": {1: 1.10, 3: 1.19, 4: 1.33, 8: 1.27, 14: 1.24, 32: 1.35, 70: 1.27},
    "CLaSp": {8: 1.24, 70: 1.64, 405: 1.73},
    "SWIFT": {7: 1.43, 13: 1.53, 70: 1.59},
}
"""Speed ÷ plain decoding's by billions of parameters: KnapSpec's Table 2 (means of three tasks; of both models of 8B),
CLaSp's on MT-bench (Table 1, and the text on Figure 5), and the best points of SWIFT's Figure 8b."""
COLOURS = ("#4269d0", "#9467bd", "#8c8c8c", "#d62728", "#ff9896")
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 720, 360, 50, 20, 190, 45
SIZES = (0.1, 1.0, 10.0, 100.0)
SPEEDS = (0.8, 1.0, 1.2, 1.4, 1.6, 1.8)


def picture(ours: Mapping[str, Mapping[float, float]]) -> str:
    """Draw an SVG of `PUBLISHED` and of our own series: speed ÷ plain decoding's by billions of parameters."""
    series = {**PUBLISHED, **ours}
    marks = [
        _line(LEFT, _y(speed), WIDTH - RIGHT, _y(speed), "#999" if speed == 1.0 else "#e4e4e4") for speed in SPEEDS
    ]
    marks += [_text(LEFT - 8, _y(speed) + 4, f"{speed:.1f}", "end") for speed in SPEEDS]
    marks += [_text(_x(size), HEIGHT - BOTTOM + 18, f"{size:g}B", "middle") for size in SIZES]
    marks.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, "parameters", "middle"))
    for place, ((name, points), colour) in enumerate(zip(series.items(), COLOURS, strict=True)):
        path = " ".join(f"{_x(size):.1f},{_y(speed):.1f}" for size, speed in sorted(points.items()))
        marks.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        marks += [
            f'<circle cx="{_x(size):.1f}" cy="{_y(each):.1f}" r="4" fill="{colour}"/>' for size, each in points.items()
        ]
        height = TOP + 20 + 24 * place
        marks.append(f'<circle cx="{WIDTH - RIGHT + 20}" cy="{height - 4}" r="4" fill="{colour}"/>')
        marks.append(_text(WIDTH - RIGHT + 32, height, name, "start"))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="13">\n'
        "<title>Speed of drafts by skipped layers, ÷ plain decoding, by model size</title>\n"
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>\n' + "\n".join(marks) + "\n</svg>\n"
    )


def _x(size: float) -> float:
    low, high = log10(0.1), log10(500)
    return LEFT + (WIDTH - LEFT - RIGHT) * (log10(size) - low) / (high - low)


def _y(speed: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (speed - SPEEDS[0]) / (SPEEDS[-1] - SPEEDS[0])


def _line(x: float, y: float, to_x: float, to_y: float, colour: str) -> str:
    return f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}" stroke="{colour}"/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="#333">{text}</text>'
