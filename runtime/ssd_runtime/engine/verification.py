"""One pass of the full model over a pending token and everything drafted behind it."""

from __future__ import annotations

import torch
from torch import Tensor

from ssd_runtime.drafting.tree import Draft
from ssd_runtime.engine.session import Session


def verify(session: Session, pending: int, draft: Draft, states: list[Tensor] | None = None) -> Tensor:
    """States [rows, hidden] of the draft's rows behind the last sub-layer.

    What the draft has begun goes on where it is. With `states`, the state before the first and behind every
    sub-layer is appended to it, for which everything is computed again.
    """
    if draft.begun is not None and states is None:
        return session.run(draft.begun.states, first=draft.begun.first)
    if draft.main_path == len(draft.tokens):
        return session.forward(draft.rows(pending), states=states)
    depths, visible = _tree(draft)
    device = session.decoder.device
    return session.forward_tree(draft.rows(pending), depths.to(device), visible.to(device), states)


def _tree(draft: Draft) -> tuple[Tensor, Tensor]:
    """Each row's distance from the pending token [rows], and which rows it sees [rows, rows]: its path."""
    assert draft.parents is not None, "a tree that is no chain has parents"
    rows = 1 + len(draft.tokens)
    visible = torch.eye(rows, dtype=torch.bool)
    for row, parent in enumerate(draft.parents, start=1):
        visible[row] |= visible[parent]
    return visible.sum(1) - 1, visible
