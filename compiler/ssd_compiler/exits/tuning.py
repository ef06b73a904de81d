"""Tunes exits, threshold, annealing and width of a domain together, by replaying drafts on calibration text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product

import numpy as np
import torch
from numpy.typing import NDArray

from ssd_artifacts.domain_config import ExitChoice
from ssd_profiles.formulas import annealed_temperature
from ssd_profiles.latency import LatencyTable
from ssd_runtime.drafting.early_exit import catch_up_ranges
from ssd_runtime.model.exit_heads import ExitHeads
from ssd_runtime.model.runner import HEAD_ROWS
from ssd_runtime.sampling.argmax import argmax_with_logit
from ssd_runtime.search.replay import ReferenceStates

ANNEALINGS = (0.0, 0.2, 0.5)
THRESHOLDS = (0.4, 0.55, 0.7, 0.8, 0.9, 0.95)
WIDTHS = (1, 2, 3, 4, 6, 8, 12)


@dataclass(frozen=True, slots=True)
class ExitTrace:
    """Predictions of every exit on one continuation, given the full model's own tokens; arrays are [tokens, layers]."""

    matches: NDArray[np.bool_]
    """Whether the exit predicts the target's next token."""
    confidence: dict[float, NDArray[np.float64]]
    """Maps an annealing to the exit's confidence in its prediction."""


@torch.inference_mode()
def exit_traces(heads: ExitHeads, reference: ReferenceStates, layers: Sequence[int], total: int) -> list[ExitTrace]:
    """Compute the predictions of exits after `layers` on every row of the reference; the model has `total` layers."""
    matches = np.empty((len(reference), len(layers)), bool)
    confidence = {annealing: np.empty(matches.shape) for annealing in ANNEALINGS}
    for column, layer in enumerate(layers):
        for begin in range(0, len(reference), HEAD_ROWS):
            rows = slice(begin, begin + HEAD_ROWS)
            logits = heads.logits(layer, reference.states[2 * layer][rows]).float()
            best, top = argmax_with_logit(logits)
            matches[rows, column] = (best == reference.targets[rows]).cpu().numpy()
            for annealing, values in confidence.items():
                heat = annealed_temperature(layer, total, annealing)
                values[rows, column] = (top / heat - (logits / heat).logsumexp(-1)).exp().cpu().numpy()
    return [
        ExitTrace(matches[group.rows], {annealing: values[group.rows] for annealing, values in confidence.items()})
        for group in reference.groups
    ]


def tune_exits(traces: Sequence[ExitTrace], layers: Sequence[int], latency: LatencyTable, context: float) -> ExitChoice:
    """Choose the exits, annealing, threshold and width with the most predicted tokens/s.

    Every run of neighbouring `layers` is tried as the set of exits; its last layer is the depth bound. A cycle costs
    its tokens' depths, catching up earlier tokens, the head at each exit passed, and a verification through the
    remaining layers. It yields the accepted tokens and one more.

    The reported speed-up is cross-validated, because the best of many settings always looks better than it is. Each
    trace is decoded with the setting that is best on the others. With two traces this is a low estimate; with one
    nothing can be held out.
    """
    costs = _Costs(latency, context)
    choices = list[ExitChoice]()
    totals = list[list[tuple[int, float]]]()
    runs = [(first, last) for first in range(len(layers)) for last in range(first, len(layers))]
    for (first, last), annealing, threshold in product(runs, ANNEALINGS, THRESHOLDS):
        columns = slice(first, last + 1)
        stops = list(layers[first : last + 1])
        chains = [_Chain.of(trace, columns, annealing, threshold) for trace in traces]
        for width in WIDTHS:
            choices.append(
                ExitChoice(stops=stops, width=width, threshold=threshold, annealing=annealing, predicted_speedup=0.0)
            )
            totals.append([_replay(chain, stops, width, costs) for chain in chains])
    tokens, seconds = np.moveaxis(np.asarray(totals, float), -1, 0)
    best = int((tokens.sum(1) / seconds.sum(1)).argmax())
    speed = _held_out(tokens, seconds) if len(traces) > 1 else tokens[best].sum() / seconds[best].sum()
    return choices[best].model_copy(update={"predicted_speedup": round(float(speed * costs.plain), 4)})


def _held_out(tokens: NDArray[np.float64], seconds: NDArray[np.float64]) -> float:
    """Tokens/s when each trace uses the setting that is best on all others; both arrays are [settings, traces]."""
    others = (tokens.sum(1, keepdims=True) - tokens) / (seconds.sum(1, keepdims=True) - seconds)
    chosen = others.argmax(0)
    each = np.arange(tokens.shape[1])
    return float(tokens[chosen, each].sum() / seconds[chosen, each].sum())


class _Costs:
    """Seconds of the parts of a step at one context length."""

    def __init__(self, latency: LatencyTable, context: float) -> None:
        self._latency = latency
        self._context = context
        self._overhead = max(0.0, latency.overhead_seconds(1))
        """Time of a step outside its layers and the head."""
        self.look = latency.draft_head_seconds(1)
        """Time of one row through the head."""
        self.plain = latency.step_seconds(context)
        # Settings differ in which cycles they have, and most cycles recur.
        self.cycle = cache(self._cycle)
        self._through = cache(self._first_layers)

    def _cycle(self, exits: tuple[int, ...], bound: int | None) -> float:
        """Time of a cycle without looks at exits, whose drafted tokens leave after the layers `exits`.

        The token after them runs to `bound` if no exit was sure of it, else to the depth of the deepest one (None).
        """
        seconds = 0.0
        depths = list[int]()
        for depth in exits:
            drafting, depths = self._step(depths, depth)
            seconds += drafting
        # The token that ends the draft runs to the depth of verification.
        drafting, depths = self._step(depths, depths[0] if bound is None else bound)
        return seconds + drafting + self._verification(depths[0], len(exits) + 1)

    def _first_layers(self, rows: int) -> NDArray[np.float64]:
        """Time of `rows` rows through the first 0, 1, … layers: [layers + 1]."""
        single = np.reshape(self._latency.sublayer_seconds(self._context, rows), (-1, 2)).sum(1)
        return np.concatenate([[0.0], single.cumsum()])

    def _layers(self, first: int, last: int, rows: int) -> float:
        """Time of `rows` rows through layers [first, last)."""
        through = self._through(rows)
        return float(through[last] - through[first])

    def _step(self, depths: Sequence[int], depth: int) -> tuple[float, list[int]]:
        """Time of drafting one token to `depth`, with shallower tokens before it caught up; and all new depths."""
        ranges, reached = catch_up_ranges([*depths, 0], depth)
        rows = len(reached)
        return self._overhead + sum(self._layers(first, last, rows - begin) for begin, first, last in ranges), reached

    def _verification(self, depth: int, rows: int) -> float:
        """Time of verifying `rows` rows that have already passed `depth` layers."""
        return self._latency.step_seconds(self._context, rows) - self._layers(0, depth, rows)


@dataclass(frozen=True, slots=True)
class _Chain:
    """Exit of each token of a trace, as the index of its stop, or the number of stops where it never exits."""

    stop: list[int]
    matches: list[bool]

    @classmethod
    def of(cls, trace: ExitTrace, columns: slice, annealing: float, threshold: float) -> _Chain:
        sure = trace.confidence[annealing][:, columns] >= threshold
        stop = np.where(sure.any(1), sure.argmax(1), sure.shape[1])
        right = trace.matches[:, columns]
        found = right[np.arange(len(stop)), np.minimum(stop, right.shape[1] - 1)]
        return cls(stop.tolist(), found.tolist())


def _replay(chain: _Chain, stops: Sequence[int], width: int, costs: _Costs) -> tuple[int, float]:
    """Tokens and seconds of the draft-verify cycles along a chain."""
    position = 0
    seconds = 0.0
    looks = 0
    never = len(stops)
    while position < len(chain.stop):
        leaving = chain.stop[position : position + width]
        is_stuck = never in leaving
        drafted = leaving[: leaving.index(never)] if is_stuck else leaving
        seconds += costs.cycle(tuple([stops[stop] for stop in drafted]), stops[-1] if is_stuck else None)
        # Where no exit was sure of a token, each one looked at it.
        looks += sum(drafted) + len(drafted) + (never if is_stuck else 0)
        accepted = 0
        while accepted < len(drafted) and chain.matches[position + accepted]:
            accepted += 1
        position += accepted + 1
    return position, seconds + looks * costs.look
