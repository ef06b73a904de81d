"""The target's choices after a verification. On a CPU they are made row by row; on other devices one read has all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ssd_runtime.drafting.tree import Draft
from ssd_runtime.model.runner import Read, Work
from ssd_runtime.sampling.argmax import candidates
from ssd_runtime.sampling.finite import NO_TOKEN, finite_argmax, require_token
from ssd_runtime.sequence.session import Session


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


def choosing(session: Session, pending: int, draft: Draft, logits: Tensor, ranks: int) -> Work[Choices]:
    """Compute the target's choices from a verification's `logits` [rows, vocabulary], and `ranks` candidates per row.

    If the session reads late (`Session.reads_late`), the draft's tokens, the choices and the candidates come to the
    host in one read.
    """
    if session.reads_late:
        return (yield from _reading(draft, logits, ranks))
    drawn = list(zip(draft.tokens, draft.probs, strict=False))
    return Choices(
        draft=draft,
        choose=session.choose(logits, lambda: draft.paths(pending), drawn),
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
