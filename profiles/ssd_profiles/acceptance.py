"""Acceptance of a mask's drafts, independent of the device: tokens and draft steps per cycle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

DRAFT_LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
THRESHOLDS = (0.0, 0.2, 0.3, 0.35, 0.4, 0.45, 0.5, 0.6, 0.7, 0.8, 0.9)


@dataclass(frozen=True, slots=True)
class AcceptanceProfile:
    """Tokens and draft steps per draft-verify cycle, for every draft length and confidence threshold.

    `tokens` and `steps` are [lengths, thresholds]; tokens per cycle (M) include the bonus token. They are replayed from
    traces, because powers of the token agreement would be wrong. Agreement comes in runs, and a threshold tends to end
    a draft just where it would have failed.
    """

    token_agreement: float
    """Share of positions whose draft token is right, given that all before it were (KnapSpec eq. 9)."""
    tokens: NDArray[np.float64]
    steps: NDArray[np.float64]
    draft_lengths: tuple[int, ...] = DRAFT_LENGTHS
    thresholds: tuple[float, ...] = THRESHOLDS

    @classmethod
    def of_traces(
        cls,
        traces: Sequence[Trace],
        draft_lengths: Sequence[int] = DRAFT_LENGTHS,
        thresholds: Sequence[float] = THRESHOLDS,
    ) -> AcceptanceProfile:
        """Compute the profile of several traces, each replayed from its start."""
        positions = sum(len(trace.matches) for trace in traces)
        if not positions:
            raise ValueError("an acceptance profile needs at least one position")
        shape = (len(draft_lengths), len(thresholds))
        tokens = np.zeros(shape)
        steps = np.zeros(shape)
        for row, length in enumerate(draft_lengths):
            for column, threshold in enumerate(thresholds):
                replays = [replay(trace, length, threshold) for trace in traces]
                cycles = sum(replay.cycles for replay in replays)
                tokens[row, column] = sum(replay.tokens for replay in replays) / cycles
                steps[row, column] = sum(replay.steps for replay in replays) / cycles
        agreement = sum(int(trace.matches.sum()) for trace in traces) / positions
        return cls(
            token_agreement=agreement,
            tokens=tokens,
            steps=steps,
            draft_lengths=tuple(draft_lengths),
            thresholds=tuple(thresholds),
        )


@dataclass(frozen=True, slots=True)
class Trace:
    """One continuation as the draft model predicts it.

    At position t the draft model predicts the next token after the target's own tokens up to t. `matches[t]` is whether
    it agrees with the target, `confidence[t]` the probability it gave its own prediction.
    """

    matches: NDArray[np.bool_]
    confidence: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Replay:
    """Totals over the draft-verify cycles of one trace."""

    cycles: int
    tokens: int
    steps: int


def replay(trace: Trace, draft_length: int, threshold: float) -> Replay:
    """Replay drafting and verification along `trace`.

    A draft ends at `draft_length` tokens, or after its first token below `threshold`. A cycle cut short by the end of
    the trace counts with what it drafted and yielded by then.
    """
    end = len(trace.matches)
    positions = np.arange(end)
    # What a cycle does from each position is computed at once: a profile has hundreds of replays.
    drafted = np.minimum(_next(trace.confidence < threshold) + 1, np.minimum(positions + draft_length, end)) - positions
    accepted = np.minimum(_next(~trace.matches) - positions, drafted)
    steps_of: list[int] = drafted.tolist()
    tokens_of: list[int] = (accepted + 1).tolist()
    position = 0
    cycles = 0
    steps = 0
    while position < end:
        cycles += 1
        steps += steps_of[position]
        position += tokens_of[position]
    # The last bonus token may lie past the end of the trace and counts all the same.
    return Replay(cycles, position, steps)


def _next(found: NDArray[np.bool_]) -> NDArray[np.int64]:
    """The first place at or after each one where `found` is true, their number without one."""
    places = np.where(found, np.arange(len(found)), len(found))
    first: NDArray[np.int64] = np.minimum.accumulate(places[::-1])[::-1]
    return first
