"""Decides which drafted tokens are accepted, and which token follows them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ssd_runtime.drafting.tree import Draft


@dataclass(frozen=True, slots=True)
class Accepted:
    """The outcome of one verification."""

    rows: list[int]
    """Accepted rows, the pending token's first."""
    next_token: int
    """The target's own token after the accepted ones: a correction after a rejection, otherwise a bonus token."""
    drafts: int
    """Number of accepted tokens of the draft's main path; an accepted sibling is not counted."""


def accept(draft: Draft, choose: Callable[[int], int]) -> Accepted:
    """Follow the target's choices through the draft.

    `choose` returns the target's token after a row; it is called in order and for accepted rows only. If that token was
    drafted there, its row is accepted too. So the output is the target's, whatever was drafted.
    """
    rows = [0]
    while (row := draft.child(rows[-1], token := choose(rows[-1]))) is not None:
        rows.append(row)
    return Accepted(rows=rows, next_token=token, drafts=sum(0 < row <= draft.main_path for row in rows))
