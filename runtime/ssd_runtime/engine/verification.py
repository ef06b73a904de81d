"""The forward of the full model over a pending token and the draft after it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ssd_runtime.devices.transfer import to_device
from ssd_runtime.drafting.tree import Draft
from ssd_runtime.model.runner import Forward
from ssd_runtime.sequence.session import Session


def verification(session: Session, pending: int, draft: Draft, keep_states: bool = False) -> Forward:
    """The request to run the full model on the draft's rows.

    A forward that the draft has begun goes on from its states. With `keep_states` it runs again from the beginning.
    """
    if draft.begun is not None and not keep_states:
        return session.request(draft.begun.states, first=draft.begun.first)
    if draft.main_path == len(draft.tokens):
        rows: Sequence[int] | Tensor = draft.rows(pending)
        if draft.unread is not None:
            rows = torch.cat([to_device([pending], draft.unread.device), draft.unread])
        return session.request(rows, keep_states=keep_states)
    depths, visible = _tree(draft)
    return session.tree_request(ids=draft.rows(pending), depths=depths, visible=visible, keep_states=keep_states)


def _tree(draft: Draft) -> tuple[list[int], Tensor]:
    """Each row's depth below the pending token [rows], and the tree-attention mask [rows, rows].

    The mask is true where the column's row is on the path from the pending token to the line's row, itself included.
    """
    assert draft.parents is not None, "a tree that is no chain has parents"
    rows = 1 + len(draft.tokens)
    visible = torch.eye(rows, dtype=torch.bool)
    for row, parent in enumerate(draft.parents, start=1):
        visible[row] |= visible[parent]
    return (visible.sum(1) - 1).tolist(), visible
