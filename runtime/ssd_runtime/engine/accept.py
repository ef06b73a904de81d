"""Which drafted tokens stand, and which token follows them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ssd_runtime.drafting.tree import Draft


@dataclass(frozen=True, slots=True)
class Accepted:
    """The outcome of one verification."""

    rows: list[int]
    """The rows that stand, from the pending token's on."""
    next_token: int
    """The target's own token behind those that stand: a correction after a rejection, a bonus token otherwise."""
    drafts: int
    """How many tokens of the draft's main path stand; a sibling that stands is not counted."""


def accept(draft: Draft, choose: Callable[[int], int]) -> Accepted:
    """Follow the target's choices through the draft.

    `choose` gives the target's token behind a row, and is asked in order and only of rows that stand. Where that
    token was drafted there, its row stands too. So the output is the target's whatever was drafted.
    """
    rows = [0]
    while (row := draft.child(rows[-1], token := choose(rows[-1]))) is not None:
        rows.append(row)
    main_path = draft.main_path
    return Accepted(rows, token, sum(0 < row <= main_path for row in rows))
