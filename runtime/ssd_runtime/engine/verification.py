"""Verifies a draft: one forward of the full model, its choice after every row, and the tokens that are accepted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ssd_runtime.devices.transfer import to_device
from ssd_runtime.drafting.tree import Draft
from ssd_runtime.model.runner import Forward, Read, Work
from ssd_runtime.sampling.argmax import candidates
from ssd_runtime.sampling.finite import NO_TOKEN, finite_argmax, require_token
from ssd_runtime.sequence.session import Session


def verification(session: Session, draft: Draft, keep_states: bool = False) -> Forward:
    """The request to run the full model on the pending token and the draft after it.

    A forward that the draft has begun goes on from its states. With `keep_states` it runs again from the beginning.
    """
    if draft.begun is not None and not keep_states:
        return session.request(draft.begun.states, first=draft.begun.first)
    if draft.main_path == len(draft.tokens):
        rows: Sequence[int] | Tensor = draft.rows(session.pending)
        if draft.unread is not None:
            rows = torch.cat([to_device([session.pending], draft.unread.device), draft.unread])
        return session.request(rows, keep_states=keep_states)
    depths, visible = _tree(draft)
    ids = draft.rows(session.pending)
    return session.tree_request(ids=ids, depths=depths, visible=visible, keep_states=keep_states)


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


@dataclass(frozen=True, slots=True)
class Choices:
    """A verified draft with the target's choice after each of its rows."""

    draft: Draft
    """The draft with all tokens on the host."""
    choose: Callable[[int], int]
    """The target's token after a row; called in order and at most once per row. Raises NotFiniteError if its logits are
    NaN or infinite."""
    candidates: Callable[[Sequence[int]], list[list[int]]]
    """The most probable tokens after some rows, best first."""
    spoiled: bool
    """Whether the draft may be why there is no choice after the first row: a drafted token whose values are NaN makes
    the rows that do not see it NaN as well, since 0 × NaN is NaN."""


def choosing(session: Session, draft: Draft, logits: Tensor, ranks: int) -> Work[Choices]:
    """Compute the target's choices from a verification's `logits` [rows, vocabulary], and `ranks` candidates per row.

    If the session reads late (`Session.reads_late`), the draft's tokens, the choices and the candidates come to the
    host in one read.
    """
    if session.reads_late:
        return (yield from _reading(draft, logits, ranks))
    drawn = list(zip(draft.tokens, draft.probs, strict=False))
    return Choices(
        draft=draft,
        choose=session.choose(logits, lambda: draft.paths(session.pending), drawn),
        candidates=lambda rows: candidates(logits, rows, ranks),
        spoiled=bool(draft.tokens) and bool(logits[0, 0].isnan()),
    )


def _reading(draft: Draft, logits: Tensor, ranks: int) -> Work[Choices]:
    rows, vocabulary = logits.shape
    ranks = min(ranks, vocabulary)
    parts = [finite_argmax(logits)]
    if ranks:
        parts.append(logits.topk(ranks).indices.flatten())
    if draft.unread is not None:
        parts.append(draft.unread)
    numbers = yield Read(torch.cat(parts))
    best = numbers[rows : rows + rows * ranks]
    return Choices(
        draft=draft if draft.unread is None else draft.read(numbers[rows + rows * ranks :]),
        choose=lambda row: require_token(numbers[row], logits.dtype),
        candidates=lambda kept: [best[row * ranks : (row + 1) * ranks] for row in kept],
        spoiled=rows > 1 and numbers[0] == NO_TOKEN,
    )


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
