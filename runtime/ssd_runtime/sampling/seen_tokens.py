"""A repetition penalty whose cost does not grow with the context."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ssd_runtime.devices.transfer import to_device


class SeenTokens:
    """The distinct tokens of one sequence, kept between steps, and the penalty on their logits.

    It equals transformers' `RepetitionPenaltyLogitsProcessor`: a seen token's logit is divided by the penalty if
    positive and multiplied if negative, once however often the token was seen.
    """

    def __init__(self, penalty: float, device: torch.device | str) -> None:
        self.penalty = penalty
        self._device = device
        self._begin([])

    def _begin(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens
        self._read = 0
        self._known: set[int] = set()
        self._ids = torch.empty(0, dtype=torch.long, device=self._device)

    def penalised(self, logits: Tensor, known: Sequence[int], paths: Sequence[Sequence[int]]) -> Tensor:
        """Penalise `logits` [n, vocabulary] of rows that follow `known` and paths[row]; returns fp32.

        If `known` is the same list as in the last call, it must only have grown at its end.
        """
        self._update(known)
        scores = logits.to(torch.float32, copy=True)
        scores[:, self._ids] = self._lowered(scores[:, self._ids])
        fresh = [(row, token) for row, path in enumerate(paths) for token in set(path) - self._known]
        if fresh:
            rows, tokens = to_device(fresh, logits.device).unbind(1)
            scores[rows, tokens] = self._lowered(scores[rows, tokens])
        return scores

    def _update(self, known: Sequence[int]) -> None:
        if known is not self._tokens or len(known) < self._read:
            self._begin(known)
        fresh = set(known[self._read :]) - self._known
        self._read = len(known)
        if fresh:
            self._known |= fresh
            self._ids = torch.cat([self._ids, to_device(sorted(fresh), self._device)])

    def _lowered(self, logits: Tensor) -> Tensor:
        return torch.where(logits < 0, logits * self.penalty, logits / self.penalty)
