"""The full model's hidden states on the latest tokens of a request: what masks are searched on as it goes."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from ssd_runtime.engine.session import Session
from ssd_runtime.model.runner import Head, Work
from ssd_runtime.search.replay import ReferenceStates, RowGroup


class RecentStates:
    """States of the tokens that the last `cycles` draft-verify cycles committed."""

    def __init__(self, cycles: int) -> None:
        self._kept: deque[list[Tensor]] = deque(maxlen=cycles)

    def __len__(self) -> int:
        """How many cycles are kept."""
        return len(self._kept)

    @property
    def tokens(self) -> int:
        """How many tokens' states are kept."""
        return sum(states[0].shape[0] for states in self._kept)

    def add(self, states: list[Tensor]) -> None:
        """Keep the states that one cycle's committed tokens have: 2L + 1 tensors [tokens, hidden]."""
        self._kept.append(states)

    def referencing(self, session: Session, rows: int | None = None) -> Work[ReferenceStates]:
        """The states of all kept tokens, or of the last `rows`; the session must not have gone on since.

        Targets are the logits' own choices, also where sampling or a penalty has chosen others: a mask is judged by
        what it makes of the logits, not by chance.
        """
        states = [torch.cat(parts) for parts in zip(*self._kept, strict=True)]
        if rows is not None:
            states = [x[-rows:] for x in states]
        n = states[0].shape[0]
        targets, _ = yield Head(states[-1], best=True)
        return ReferenceStates(states, targets, [RowGroup(session.cache, session.committed - n, 0, n)])
