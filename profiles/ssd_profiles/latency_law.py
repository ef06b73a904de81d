"""The sanity law of latency tables, which tables of a quiet machine obey and most of a busy one break."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

import numpy as np

from ssd_profiles.arrays import Array
from ssd_profiles.latency import LatencyTable

FALL = 0.25
"""Largest share by which more rows or a longer context may take less time: errors of quiet tables reach 0.2."""
PASSES = 1.5
"""Most that rows may take ÷ the passes of fewer rows that would do the same. Kernels that change with the number of
rows reach 1.2."""
LEAST_WHOLE = 0.75
"""Least that a whole step may take ÷ the sum of its parts. Quiet tables reach 0.88."""
MOST_WHOLE = 2.0
"""Most that a whole step may take ÷ the sum of its parts, each of which may fit a cache that the model does not."""
HOST_SECONDS = 0.01
"""Seconds that a step may take besides, whatever its size: the rows' embeddings and the batch."""
TYPICAL_SPREAD = 0.3
"""Largest median of a figure's spreads over rows and contexts. Quiet tables have 0.1 to 0.2."""
WORST_SPREAD = 1.0
"""Largest spread of any figure: half of its samples are within its own size."""
LIGHT_WHOLE = (0.5, 3.0)
"""Bounds of a step ÷ its parts on light copies, whose shares were measured after the table."""


def broken_law(table: LatencyTable) -> str | None:
    """The first part of the law that a table breaks, as a clause for a user; None for a sound table.

    The spreads of all figures are stated and bounded. More rows, longer contexts and more sequences take at least as
    long, and at most as long as the passes that would do the same. The parts of a step add up to the whole step.
    """
    return next(_breaches(table), None) or broken_light_law(table)


def broken_light_law(table: LatencyTable) -> str | None:
    """The part of the law that the costs of light copies break: their parts add up to their whole steps."""
    least, most = LIGHT_WHOLE
    for bits, costs in table.light.items():
        for rows in costs.queries:
            parts = sum(table.sublayer_seconds(costs.context, rows, bits)) + table.head_seconds(rows, bits)
            whole = parts + table.overhead_seconds(rows, bits)
            if not least * parts <= whole <= most * parts + HOST_SECONDS:
                return f"in {bits} bits {_sum_text(rows, whole, parts)}"
    return None


def _breaches(table: LatencyTable) -> Iterator[str]:
    parts = table.parts
    whole = parts + table.overhead
    for rows, taken, total in zip(table.queries, whole, parts, strict=True):
        if not LEAST_WHOLE * total <= taken <= MOST_WHOLE * total + HOST_SECONDS:
            yield _sum_text(rows, taken, total)
    for kind, values in table.attention.items():
        for by_rows in values:
            yield from _curve_breaches(_mixer(kind), "row", table.queries, by_rows)
        for by_context in values.T:
            yield from _curve_breaches(_mixer(kind), "cached token", table.contexts, by_context)
    yield from _curve_breaches("an MLP block", "row", table.queries, table.mlp)
    yield from _curve_breaches("the head", "row", table.queries, table.head)
    yield from _curve_breaches("a step", "row", table.queries, whole)
    wide = np.append(table.queries[-1], table.wide_queries)
    yield from _curve_breaches("a step", "row", wide, whole[-1] * np.append(1.0, table.growth))
    context = float(table.contexts[0])
    plain = table.step_seconds(context)
    for count in table.sequences:
        shared = table.step_seconds(context, count, sequences=count)
        if shared > PASSES * count * plain:
            yield f"a step of {count:.0f} sequences takes {_ms(shared)} and one of each {_ms(count * plain)} together"
    for name in (*table.attention, "mlp", "head", "step"):
        yield from _spread_breaches(_FIGURES.get(name) or _mixer(name), table.spread.get(name))


def _mixer(kind: str) -> str:
    """Name of the mixer in layers of a kind."""
    return f"{kind} attention" if kind in ("full", "sliding") else f"a {kind} mixer"


def _spread_breaches(name: str, spread: Array | None) -> Iterator[str]:
    if spread is None or not spread.size:
        yield f"there are too few samples of {name} to state their spread"
    elif np.median(spread) > TYPICAL_SPREAD or spread.max() > WORST_SPREAD:
        yield f"the times of {name} spread by {np.median(spread):.2g} to {spread.max():.2g} of their median"


def _curve_breaches(what: str, unit: str, grid: Array, values: Array) -> Iterator[str]:
    """Falls, and leaps beyond the passes that would do the same, between neighbours on a grid."""
    for few, many, less, more in zip(grid, grid[1:], values, values[1:], strict=False):
        passes = ceil(many / max(few, 1.0))
        if not (1.0 - FALL) * less <= more <= PASSES * passes * less:
            yield f"{what} takes {_ms(less)} with {_counted(few, unit)} and {_ms(more)} with {_counted(many, unit)}"


def _sum_text(rows: float, whole: float, parts: float) -> str:
    return f"a step with {_counted(rows, 'row')} takes {_ms(whole)} and its parts {_ms(parts)}"


def _counted(count: float, unit: str) -> str:
    return f"{count:.0f} {unit}{'' if count == 1 else 's'}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


_FIGURES = {"mlp": "MLP blocks", "head": "the head", "step": "whole steps"}
