"""The full model's hidden states on the latest tokens of a request, on which online searches compare masks."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from ssd_runtime.model.runner import Head, Work
from ssd_runtime.search.replay import ReferenceStates, RowGroup
from ssd_runtime.sequence.session import Session


class RecentStates:
    """States of the tokens that the last `cycles` draft-verify cycles committed."""

    def __init__(self, cycles: int) -> None:
        self._kept: deque[list[Tensor]] = deque(maxlen=cycles)

    def __len__(self) -> int:
        """Number of cycles whose states are kept."""
        return len(self._kept)

    @property
    def tokens(self) -> int:
        """Number of tokens whose states are kept."""
        return sum(states[0].shape[0] for states in self._kept)

    def add(self, states: list[Tensor]) -> None:
        """Keep the states of one cycle's committed tokens: 2L + 1 tensors [tokens, hidden]."""
        self._kept.append(states)

    def referencing(self, session: Session, rows: int | None = None) -> Work[ReferenceStates]:
        """Join the states of all kept tokens, or of the last `rows`; the session must not have gone on since.

        Targets are the arg max of the logits, even if sampling or a penalty chose other tokens: masks are compared
        by their logits, not by chance.
        """
        states = [torch.cat(parts) for parts in zip(*self._kept, strict=True)]
        if rows is not None:
            states = [x[-rows:] for x in states]
        n = states[0].shape[0]
        targets, _ = yield Head(states[-1], best=True)
        group = RowGroup(cache=session.cache, start=session.committed - n, begin=0, end=n)
        return ReferenceStates(states, targets, [group])
