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
    tokens: list[int]
    """The target's tokens: the accepted drafts, then a correction after a rejection, otherwise a bonus token. An
    accepted draft that ends the answer is the last one."""
    drafts: int
    """Number of accepted tokens of the draft's main path; an accepted sibling is not counted."""


def accept(draft: Draft, choose: Callable[[int], int], goes_on: Callable[[int], bool]) -> Accepted:
    """Follow the target's choices through the draft, up to the end of the answer.

    `choose` returns the target's token after a row; it is called in order and for accepted rows only. If that token was
    drafted there, its row is accepted too. So the output is the target's, whatever was drafted. `goes_on` receives
    every token once it is chosen, and tells whether the answer goes on after it.
    """
    rows = [0]
    tokens = list[int]()
    row: int | None = 0
    open_ended = True
    while row is not None and open_ended:
        tokens.append(choose(row))
        open_ended = goes_on(tokens[-1])
        if (row := draft.child(row, tokens[-1])) is not None:
            rows.append(row)
    return Accepted(rows=rows, tokens=tokens, drafts=sum(0 < row <= draft.main_path for row in rows))
