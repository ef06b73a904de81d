"""Fits a latency table to the samples of its figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ssd_profiles.arrays import Array
from ssd_profiles.latency import DeviceKey, LatencyTable, base_of
from ssd_runtime.profiling.rising import rising
from ssd_runtime.profiling.shared_steps import NONE

DRAFT_HEAD = "draft head 1"
"""Name of the figure of a draft's head on one row."""
MIN_SAMPLES = 3
"""Fewest samples of a figure whose spread is stated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Samples of every figure of a table, in the order in which they were taken."""

    device: DeviceKey
    layer_kinds: tuple[str, ...]
    queries: tuple[int, ...]
    contexts: Sequence[int]
    sweeps: Sequence[dict[str, float]]
    """Seconds by figure of each sweep: `mlp N`, `head N` and `KIND CONTEXT N` for passes through all layers of N rows,
    in some sweeps only; `step N` for whole steps at `base`, each after `plain N`, a step of one row."""

    @property
    def base(self) -> int:
        """Cached tokens at which whole steps were timed."""
        return self.contexts[base_of(self.contexts)]

    def layers(self, kind: str) -> int:
        """Number of layers of a kind."""
        return self.layer_kinds.count(kind)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of layers, each once."""
        return tuple(dict.fromkeys(self.layer_kinds))

    def plain(self) -> list[float]:
        """Seconds of all plain steps."""
        return [sweep[f"plain {n}"] for sweep in self.sweeps for n in self.queries]

    def seconds(self, name: str, passes: int) -> list[Array]:
        """Seconds of a figure ÷ `passes`: an array of samples for each number of rows."""
        return [
            np.asarray([s[f"{name} {n}"] for s in self.sweeps if f"{name} {n}" in s]) / passes for n in self.queries
        ]

    def shares(self, name: str, passes: int) -> list[Array]:
        """Samples of a figure ÷ `passes`, each ÷ the median of its sweep's plain steps."""
        paces = [float(np.median([sweep[f"plain {n}"] for n in self.queries])) for sweep in self.sweeps]
        pairs = list(zip(self.sweeps, paces, strict=True))
        return [
            np.asarray([sweep[f"{name} {n}"] / pace for sweep, pace in pairs if f"{name} {n}" in sweep]) / passes
            for n in self.queries
        ]

    def draft_head(self) -> float:
        """Seconds of a draft's head ÷ those of the whole head, each on one row."""
        shares = [sweep[DRAFT_HEAD] / sweep["head 1"] for sweep in self.sweeps if DRAFT_HEAD in sweep]
        return min(1.0, float(np.median(shares))) if shares else 1.0

    def steps(self) -> list[Array]:
        """Samples of whole steps, each ÷ the plain step before it."""
        return [np.asarray([s[f"step {n}"] / s[f"plain {n}"] for s in self.sweeps]) for n in self.queries]


def fitted(samples: Samples, shared: Mapping[str, Any]) -> LatencyTable:
    """The table of medians, with the fields `shared` about shared steps.

    Every sample counts in plain steps of its own moment, so that parts and whole steps are of one pace even if another
    process begins or ends on the way. A step's overhead is then not the difference of two moments.
    """
    plain = float(np.median(samples.plain()))
    spread = dict[str, Array]()

    def curve(name: str, passes: int) -> tuple[Array, Array]:
        return _curve(samples.shares(name, passes))

    attention = dict[str, Array]()
    for kind in samples.kinds:
        curves = [curve(f"{kind} {context}", samples.layers(kind)) for context in samples.contexts]
        # A longer context never takes less time either, and the table continues with the last slope.
        attention[kind] = plain * np.apply_along_axis(rising, 0, np.asarray([medians for medians, _ in curves]))
        spread[kind] = np.asarray([spreads for _, spreads in curves])
    mlp, spread["mlp"] = curve("mlp", len(samples.layer_kinds))
    head, spread["head"] = curve("head", 1)
    growth, spread["step"] = _curve(samples.steps())
    return _table(
        samples=samples,
        attention=attention,
        mlp=plain * mlp,
        head=plain * head,
        step=plain * growth / growth[0],
        # One sample or two tell nothing of their noise.
        spread=spread if min(map(len, samples.shares("head", 1))) >= MIN_SAMPLES else {},
        shared=shared,
    )


def coarse(samples: Samples) -> LatencyTable:
    """A table for a machine that is too busy for `fitted`: whole steps as measured, parts as shares of them.

    Other processes only add time. So a step takes the least that it or a step of more rows has taken, and at most the
    passes of fewer rows that would do the same. Each part has one share of a step, whatever its rows. No spread is
    stated, so that the table breaks the law for good.
    """
    step = _least(samples.seconds("step", 1))
    step[0] = min(step[0], *samples.plain())
    for few, many in zip(range(step.size), range(1, step.size), strict=False):
        step[many] = min(step[many], np.ceil(samples.queries[many] / samples.queries[few]) * step[few])
    of_kinds = {
        kind: np.asarray([_least(samples.seconds(f"{kind} {c}", samples.layers(kind))) for c in samples.contexts])
        for kind in samples.kinds
    }
    mlp = _least(samples.seconds("mlp", len(samples.layer_kinds)))
    head = _least(samples.seconds("head", 1))
    base = base_of(samples.contexts)
    whole = sum((of_kinds[kind][base] for kind in samples.layer_kinds), len(samples.layer_kinds) * mlp + head)
    shares = {kind: rising(np.median(values / whole, axis=1)) for kind, values in of_kinds.items()}
    of_mlp, of_head = np.median(mlp / whole), np.median(head / whole)
    total = sum(shares[kind][base] for kind in samples.layer_kinds) + len(samples.layer_kinds) * of_mlp + of_head
    return _table(
        samples=samples,
        attention={kind: share[:, None] * step / total for kind, share in shares.items()},
        mlp=of_mlp * step / total,
        head=of_head * step / total,
        step=step,
        spread={},
        shared=NONE,
    )


def _table(
    samples: Samples,
    attention: dict[str, Array],
    mlp: Array,
    head: Array,
    step: Array,
    spread: dict[str, Array],
    shared: Mapping[str, Any],
) -> LatencyTable:
    """The table whose whole steps take `step`; its overhead is what the parts leave of them."""
    without = LatencyTable(
        device=samples.device,
        layer_kinds=samples.layer_kinds,
        queries=np.asarray(samples.queries, float),
        contexts=np.asarray(samples.contexts, float),
        attention=attention,
        mlp=mlp,
        head=head,
        overhead=np.zeros_like(step),
        spread=spread,
        draft_head=samples.draft_head(),
        **shared,
    )
    return replace(without, overhead=step - without.parts)


def spread_of(samples: Array | Sequence[float]) -> float:
    """Interquartile range ÷ median, which one late sample of many does not raise."""
    low, middle, high = np.percentile(samples, [25, 50, 75])
    return float((high - low) / middle)


def _curve(taken: Sequence[Array]) -> tuple[Array, Array]:
    """Medians of the samples at each number of rows, made to rise, and their spreads.

    More rows never take less time; where the samples say so, it is noise, and the spread is at least the correction.
    """
    middle = np.asarray([np.median(samples) for samples in taken])
    risen = rising(middle)
    return risen, np.maximum([spread_of(samples) for samples in taken], np.abs(middle - risen) / risen)


def _least(taken: Sequence[Array]) -> Array:
    """The least sample at each number of rows, or at a larger number if that took less."""
    least = np.asarray([samples.min() for samples in taken])
    envelope: Array = np.minimum.accumulate(least[::-1])[::-1]
    return envelope
