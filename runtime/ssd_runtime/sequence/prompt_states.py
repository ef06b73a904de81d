"""Sums of a sequence's normed states per block of tokens, from which a resumed prompt gets its mean feature."""

from __future__ import annotations

import torch
from torch import Tensor

from ssd_runtime.model.runner import FinalNorm, Work, concatenated
from ssd_runtime.sequence.mtp_states import MtpStates

BLOCK = 64
"""Tokens per sum. A prompt that begins like an earlier sequence resumes at a multiple of it."""


class PromptStates:
    """One sum of normed states per whole block of committed tokens, and the states of the tokens after the last block.

    Sums per block do not depend on how tokens were split into forwards, except for rounding. States of an answer's
    tokens are summed only when a prompt resumes after them, because summing in every cycle would take time.
    """

    def __init__(self, mtp: MtpStates | None = None) -> None:
        """`mtp` goes with these states wherever they go; None for a model without such a layer."""
        self.mtp = mtp
        self._sums: list[Tensor] = []
        """Sums [blocks, hidden] in fp32, of consecutive blocks."""
        self._open: list[Tensor] = []
        """States [n, hidden] after the last sub-layer, of the tokens after the last whole block."""
        self._joined = 0
        """Number of the first of these that were joined, each of `BLOCK` cycles."""

    @property
    def bytes(self) -> int:
        """Bytes of the sums and states; the MTP layer's are among these."""
        return sum(each.nbytes for each in (*self._sums, *self._open))

    def copy(self) -> PromptStates:
        """Return an independent copy of the same states."""
        other = PromptStates(None if self.mtp is None else self.mtp.copy())
        other._sums = list(self._sums)
        other._open = list(self._open)
        other._joined = self._joined
        return other

    def add(self, states: Tensor) -> None:
        """Add the states [n, hidden] of the next tokens, after the last sub-layer and before the final norm."""
        self._open.append(states)
        if self.mtp is not None:
            self.mtp.add(states)
        parts = self._open[self._joined :]
        if len(parts) == BLOCK:  # else a long answer's states would be a tensor per cycle
            whole = torch.cat(parts)
            self._open[self._joined :] = [whole]
            self._joined += 1
            if self.mtp is not None:
                self.mtp.join(parts, whole)

    def closing(self) -> Work[Tensor]:
        """Norm the states after the last sum and sum their whole blocks; returns these normed states [n, hidden]."""
        rows = concatenated(self._open)
        normed = yield FinalNorm(rows)
        blocks = rows.shape[0] // BLOCK
        if blocks:
            whole = normed[: blocks * BLOCK].unflatten(0, (blocks, BLOCK))
            self._sums.append(whole.sum(1, dtype=torch.float32))
        # A copy: a view would keep the states of all blocks in memory.
        self._open = [rows[blocks * BLOCK :].clone()]
        self._joined = 0
        return normed

    def resuming(self, tokens: int) -> Work[PromptStates]:
        """Return the states of the first `tokens` tokens, a multiple of `BLOCK`."""
        closed = self.copy()  # several sequences may resume from the same states at once
        if tokens > sum(map(len, closed._sums)) * BLOCK:
            yield from closed.closing()
        beginning = PromptStates(None if self.mtp is None else self.mtp.copy(tokens))
        beginning._sums = [concatenated(closed._sums)[: tokens // BLOCK]]
        return beginning

    def mean(self, normed: Tensor, tokens: int) -> Tensor:
        """Mean [hidden] over all `tokens` tokens; `normed` is the result of the latest `closing`."""
        total = normed[normed.shape[0] - tokens % BLOCK :].sum(0, dtype=torch.float32)
        for sums in self._sums:
            total = total + sums.sum(0)
        return total / tokens
