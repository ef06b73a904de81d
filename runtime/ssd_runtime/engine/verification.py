"""The pass of the full model over a pending token and everything drafted after it."""

from __future__ import annotations

import torch
from torch import Tensor

from ssd_runtime.drafting.tree import Draft
from ssd_runtime.engine.session import Session
from ssd_runtime.model.runner import Forward


def verification(session: Session, pending: int, draft: Draft, keep_states: bool = False) -> Forward:
    """The request to run the full model on the draft's rows.

    What the draft has begun goes on where it is, unless states are kept: then everything is computed again.
    """
    if draft.begun is not None and not keep_states:
        return session.request(draft.begun.states, first=draft.begun.first)
    if draft.main_path == len(draft.tokens):
        return session.request(draft.rows(pending), keep_states=keep_states)
    depths, visible = _tree(draft)
    device = session.decoder.device
    return session.tree_request(draft.rows(pending), depths.to(device), visible.to(device), keep_states)


def _tree(draft: Draft) -> tuple[Tensor, Tensor]:
    """Each row's distance from the pending token [rows], and which rows it sees [rows, rows]: its path."""
    assert draft.parents is not None, "a tree that is no chain has parents"
    rows = 1 + len(draft.tokens)
    visible = torch.eye(rows, dtype=torch.bool)
    for row, parent in enumerate(draft.parents, start=1):
        visible[row] |= visible[parent]
    return visible.sum(1) - 1, visible
