"""One pass of the full model over a pending token and everything drafted behind it."""

from __future__ import annotations

import torch
from torch import Tensor

from ssd_runtime.drafting.draft import Draft
from ssd_runtime.session import Session


def verify(session: Session, pending: int, draft: Draft, states: list[Tensor] | None = None) -> Tensor:
    """States [rows, hidden] of the draft's rows behind the last sub-layer.

    What the draft has begun goes on where it is. With `states`, the state before the first and behind every
    sub-layer is appended to it, for which everything is computed again.
    """
    if draft.begun is not None and states is None:
        return session.run(draft.begun.states, first=draft.begun.first)
    if not any(draft.siblings):
        return session.forward(draft.rows(pending), states=states)
    depths, visible = _tree(draft, session.decoder.device)
    return session.forward_tree(draft.rows(pending), depths, visible, states)


def _tree(draft: Draft, device: torch.device) -> tuple[Tensor, Tensor]:
    """Each row's distance from the pending token [rows], and which rows it sees [rows, rows].

    A row of the chain sees the chain up to itself; a sibling sees the chain before its place, and itself.
    """
    trunk = 1 + len(draft.tokens)
    places = torch.tensor(draft.sibling_places(), device=device)
    depths = torch.cat([torch.arange(trunk, device=device), places + 1])
    rows = torch.arange(len(depths), device=device)
    own = rows[:, None] == rows
    return depths, own | ((rows < trunk) & (rows < depths[:, None]))
