"""Runs transformers' logits processors on the rows of one sequence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

STATEFUL = frozenset({"SynthIDTextWatermarkLogitsProcessor"})
"""Processors of transformers that count their calls, so that drafts must not call them."""


@contextmanager
def callers_mode() -> Iterator[None]:
    """Run a user's code as `generate` does: its tensors outlive the engine's inference mode."""
    with torch.inference_mode(False), torch.no_grad():
        yield


class SequenceIds:
    """The token ids of one sequence as a tensor [1, n], extended in place of being built anew."""

    def __init__(self, before: Tensor) -> None:
        """`before` [m] are the ids in front of the sequence's own, such as padding."""
        self._before = before
        self._restart([])

    def _restart(self, known: Sequence[int]) -> None:
        self._known = known
        self._ids = self._before
        self._read = 0

    def tensor(self, known: Sequence[int], tail: Sequence[int] = ()) -> Tensor:
        """The ids before, those `known` and those of `tail`.

        If `known` is the same list as in the last call, it must only have grown at its end.
        """
        if known is not self._known or len(known) < self._read:
            self._restart(known)
        fresh = known[self._read :]
        if fresh:
            self._ids = torch.cat([self._ids, self._ids.new_tensor(fresh)])
            self._read = len(known)
        return torch.cat([self._ids, self._ids.new_tensor(list(tail))])[None]


class RowProcessors:
    """Logits processors of one sequence, called as transformers' `generate` calls them for a batch of one.

    The target's choices call every processor exactly once per new token, in order, with the ids before that token.
    Draft choices call only the processors without a state: those of transformers, and a user's that say that they are
    `repeatable`. This changes how good a draft is, never the output.
    """

    def __init__(
        self,
        processors: Sequence[LogitsProcessor],
        before: Tensor,
        keep_scores: bool = False,
        keep_logits: bool = False,
    ) -> None:
        """`before` [m] are ids that processors read before the sequence's own; their device is that of all ids."""
        self._all = LogitsProcessorList(processors)
        self._for_drafts = LogitsProcessorList(each for each in processors if is_repeatable(each))
        self._ids = SequenceIds(before)
        self._device = before.device
        self._keep_scores = keep_scores
        self._keep_logits = keep_logits
        self.scores: list[Tensor] = []
        """Processed scores [1, vocabulary] of every choice of the target, if they are kept."""
        self.logits: list[Tensor] = []
        """Logits [1, vocabulary] of every choice of the target, if they are kept."""

    def target(self, logits: Tensor, known: Sequence[int], tail: Sequence[int], raw: Tensor) -> Tensor:
        """Scores [vocabulary] in fp32 of the target's `logits` after the tokens `known` and `tail`.

        `raw` are the model's own logits, of which a grammar may have left out tokens.
        """
        with callers_mode():
            if self._keep_logits:
                self.logits.append(self._row(raw))
            scores: Tensor = self._all(self._ids.tensor(known, tail), self._row(logits))
            if self._keep_scores:
                self.scores.append(scores)
        return scores[0].to(logits.device)

    def draft(self, logits: Tensor, known: Sequence[int], tail: Sequence[int]) -> Tensor:
        """Scores [vocabulary] in fp32 of a draft's `logits`."""
        with callers_mode():
            try:
                scores: Tensor = self._for_drafts(self._ids.tensor(known, tail), self._row(logits))
            except Exception:  # drafts go on after ends that no target passes; a target raises it again
                scores = self._row(logits)
        return scores[0].to(logits.device)

    def _row(self, logits: Tensor) -> Tensor:
        """A copy [1, vocabulary] in fp32, because processors may write into it."""
        return logits[None].to(self._device, torch.float32, copy=True)


def is_repeatable(processor: object) -> bool:
    """Whether calls for drafts have no effect on later calls; a user's own processor or function may have a state."""
    # PrefixConstrainedLogitsProcessor calls a function of the user's.
    processor = getattr(processor, "_prefix_allowed_tokens_fn", processor)
    kind = type(processor)
    known = kind.__module__.startswith("transformers.") and kind.__name__ not in STATEFUL
    return known or getattr(processor, "repeatable", False)
