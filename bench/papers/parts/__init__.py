"""The parts of docs/papers.md: comparisons of strategies, and measurements by other tools."""

from bench.papers.parts.comparisons import COMPARISONS
from bench.papers.parts.measurements import MEASUREMENTS
from bench.papers.parts.part import Part

PARTS: tuple[Part, ...] = (*COMPARISONS, *MEASUREMENTS)

__all__ = ["COMPARISONS", "MEASUREMENTS", "PARTS", "Part"]
