"""Which exits, how sure, how many tokens: tuned together for a domain by replaying drafts over its calibration text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
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
    """One continuation as every exit sees it, the full model's own tokens given: [tokens, layers] each."""

    matches: NDArray[np.bool_]
    """Whether the exit predicts the target's next token."""
    confidence: dict[float, NDArray[np.float64]]
    """By annealing: how sure it is."""


@torch.inference_mode()
def exit_traces(heads: ExitHeads, reference: ReferenceStates, layers: Sequence[int], total: int) -> list[ExitTrace]:
    """What exits behind `layers` of `total` say on every row of the reference."""
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
    """The exits, annealing, threshold and width of most tokens a second.

    Every run of neighbouring `layers` is tried as the layers to leave behind, its last one being the depth bound. A
    cycle costs what its tokens' depths cost, those that have to come along deeper than they left included, the looks
    at the head, and a verification through the layers behind the deepest; it yields the accepted tokens and the one
    behind them. What is predicted of the choice is what each trace shows of the way that the others would choose: of
    many ways the best one always looks better than it is. Of two traces that is a low estimate, and of one nothing
    can be held out.
    """
    costs = _Costs.at(latency, context)
    ways, totals = list[ExitChoice](), list[list[tuple[int, float]]]()
    runs = [(first, last) for first in range(len(layers)) for last in range(first, len(layers))]
    for (first, last), annealing, threshold in product(runs, ANNEALINGS, THRESHOLDS):
        columns, stops = slice(first, last + 1), list(layers[first : last + 1])
        chains = [_Chain.of(trace, columns, annealing, threshold) for trace in traces]
        for width in WIDTHS:
            ways.append(
                ExitChoice(stops=stops, width=width, threshold=threshold, annealing=annealing, predicted_speedup=0.0)
            )
            totals.append([_replay(chain, stops, width, costs) for chain in chains])
    tokens, seconds = np.moveaxis(np.asarray(totals, float), -1, 0)
    best = int((tokens.sum(1) / seconds.sum(1)).argmax())
    speed = _held_out(tokens, seconds) if len(traces) > 1 else tokens[best].sum() / seconds[best].sum()
    return ways[best].model_copy(update={"predicted_speedup": round(float(speed * costs.plain), 4)})


def _held_out(tokens: NDArray[np.float64], seconds: NDArray[np.float64]) -> float:
    """Tokens a second where each trace is decoded the way that is best for all others; both [ways, traces]."""
    others = (tokens.sum(1, keepdims=True) - tokens) / (seconds.sum(1, keepdims=True) - seconds)
    chosen, each = others.argmax(0), np.arange(tokens.shape[1])
    return float(tokens[chosen, each].sum() / seconds[chosen, each].sum())


@dataclass(frozen=True, slots=True)
class _Costs:
    """Seconds at one context length."""

    latency: LatencyTable
    context: float
    overhead: float
    """What a step takes beside its layers."""
    look: float
    """One token through the head."""
    plain: float
    through: dict[int, NDArray[np.float64]] = field(default_factory=dict)
    """By the number of rows: all of them through the first 0, 1, … layers, [layers + 1]."""

    @classmethod
    def at(cls, latency: LatencyTable, context: float) -> _Costs:
        overhead = max(0.0, latency.overhead_seconds(1))
        return cls(latency, context, overhead, latency.head_seconds(1), latency.step_seconds(context))

    def layers(self, first: int, last: int, rows: int) -> float:
        """So many rows together through layers `first` to `last`, the last one left out."""
        if rows not in self.through:
            single = np.reshape(self.latency.sublayer_seconds(self.context, rows), (-1, 2)).sum(1)
            self.through[rows] = np.concatenate([[0.0], single.cumsum()])
        return float(self.through[rows][last] - self.through[rows][first])

    def step(self, depths: list[int], depth: int) -> float:
        """One token more, brought to `depth` as drafting does: those before it that are not as deep come along."""
        depths.append(0)
        ways = catch_up_ranges(depths, depth)
        return self.overhead + sum(self.layers(first, last, len(depths) - begin) for begin, first, last in ways)

    def verification(self, depth: int, rows: int) -> float:
        """From behind layer `depth` on."""
        return self.latency.step_seconds(self.context, rows) - self.layers(0, depth, rows)


@dataclass(frozen=True, slots=True)
class _Chain:
    """Where each token of a trace leaves: the stop's number, or that of all stops where it does not."""

    stop: NDArray[np.int64]
    matches: NDArray[np.bool_]

    @classmethod
    def of(cls, trace: ExitTrace, columns: slice, annealing: float, threshold: float) -> _Chain:
        sure = trace.confidence[annealing][:, columns] >= threshold
        stop = np.where(sure.any(1), sure.argmax(1), sure.shape[1])
        right = trace.matches[:, columns]
        found = right[np.arange(len(stop)), np.minimum(stop, right.shape[1] - 1)]
        return cls(stop, found)


def _replay(chain: _Chain, stops: Sequence[int], width: int, costs: _Costs) -> tuple[int, float]:
    """Tokens and seconds of draft-verify cycles along a chain."""
    position, seconds, end = 0, 0.0, len(chain.stop)
    while position < end:
        limit = min(position + width, end)
        leaving = chain.stop[position:limit]
        stuck = np.flatnonzero(leaving == len(stops))
        drafted = int(stuck[0]) if stuck.size else limit - position
        depths = list[int]()
        for stop in leaving[:drafted].tolist():
            seconds += costs.step(depths, stops[stop]) + (stop + 1) * costs.look
        # The token that ends the draft goes to the depth of the verification, looked at on its way where it was stuck.
        seconds += costs.step(depths, stops[-1] if stuck.size else depths[0])
        seconds += len(stops) * costs.look if stuck.size else 0.0
        seconds += costs.verification(depths[0], drafted + 1)
        wrong = np.flatnonzero(~chain.matches[position : position + drafted])
        position += (int(wrong[0]) if wrong.size else drafted) + 1
    return position, seconds
