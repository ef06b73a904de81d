"""Which exits, how sure, how many tokens: tuned together for a domain by replaying drafts over its calibration text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
from numpy.typing import NDArray

from ssd_artifacts.domain_record import ExitChoice
from ssd_profiles.formulas import annealed_temperature
from ssd_profiles.latency import LatencyTable
from ssd_runtime.exits import ExitHeads
from ssd_runtime.highest import surest
from ssd_runtime.states import HEAD_ROWS, ReferenceStates

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
            best, top = surest(logits)
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
    cycle costs what its tokens' own depths cost, the looks at the head, and a verification through the layers
    behind the deepest; it yields the accepted tokens and the one behind them.
    """
    costs = _Costs.at(latency, context)
    best: ExitChoice | None = None
    runs = [(first, last) for first in range(len(layers)) for last in range(first, len(layers))]
    for (first, last), annealing, threshold in product(runs, ANNEALINGS, THRESHOLDS):
        columns, stops = slice(first, last + 1), list(layers[first : last + 1])
        chains = [_Chain.of(trace, columns, annealing, threshold) for trace in traces]
        for width in WIDTHS:
            totals = [_replay(chain, stops, width, costs) for chain in chains]
            speed = sum(tokens for tokens, _ in totals) / sum(seconds for _, seconds in totals) * costs.plain
            if best is None or speed > best.predicted_speedup:
                best = ExitChoice(
                    stops=stops, width=width, threshold=threshold, annealing=annealing, predicted_speedup=speed
                )
    assert best is not None, "there are exits to choose from"
    return best.model_copy(update={"predicted_speedup": round(best.predicted_speedup, 4)})


@dataclass(frozen=True, slots=True)
class _Costs:
    """Seconds at one context length."""

    prefix: list[float]
    """A step of one token through the first layers, by their number."""
    look: float
    """One token through the head."""
    plain: float
    latency: LatencyTable
    rest: dict[tuple[int, int], float]
    """Verification of so many rows from behind so many layers on."""
    context: float

    @classmethod
    def at(cls, latency: LatencyTable, context: float) -> _Costs:
        single = latency.sublayer_seconds(context, 1)
        layers = np.cumsum([0.0, *(a + b for a, b in zip(single[::2], single[1::2], strict=True))])
        prefix = (layers + max(0.0, latency.overhead_seconds(1))).tolist()
        return cls(prefix, latency.head_seconds(1), latency.step_seconds(context), latency, {}, context)

    def verification(self, depth: int, rows: int) -> float:
        if (depth, rows) not in self.rest:
            skipped = sum(self.latency.sublayer_seconds(self.context, rows)[: 2 * depth])
            self.rest[depth, rows] = self.latency.step_seconds(self.context, rows) - skipped
        return self.rest[depth, rows]


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
        left = leaving[:drafted]
        deepest = stops[-1] if stuck.size else stops[int(left.max())]
        seconds += sum(costs.prefix[stops[stop]] + (stop + 1) * costs.look for stop in left.tolist())
        # The token that ends the draft goes to the depth of the verification, looked at on its way where it was stuck.
        seconds += costs.prefix[deepest] + (len(stops) * costs.look if stuck.size else 0.0)
        seconds += costs.verification(deepest, drafted + 1)
        wrong = np.flatnonzero(~chain.matches[position : position + drafted])
        position += (int(wrong[0]) if wrong.size else drafted) + 1
    return position, seconds
