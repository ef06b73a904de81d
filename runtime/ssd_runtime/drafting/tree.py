"""Drafts as trees of tokens, and the interface of drafters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from torch import Tensor

from ssd_runtime.model.runner import Work
from ssd_runtime.sequence.session import Session

Origin = Literal["guess", "light", "mtp", "skipped", "plain"]
"""The way in which a token was drafted.

`guess`: a copy, a successor or what a grammar determines. `light`: a step of the model on light copies of its weights.
`mtp`: a step of the model's MTP layer alone. `skipped`: a step that skipped sub-layers or tokens of the vocabulary, or
exited early. `plain`: the token was not drafted.
"""


@dataclass(frozen=True, slots=True)
class PartialForward:
    """A forward of a draft's rows that has run the full model's first sub-layers and written their keys."""

    first: int
    """The next sub-layer."""
    states: Tensor
    """States [1 + drafted, hidden] of the pending token and every drafted one."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A tree of tokens after the pending one, most often a chain.

    In the verification, row 0 is the pending token and row i + 1 is `tokens[i]`.
    """

    tokens: list[int]
    parents: Sequence[int] | None = None
    """parents[i], at most i, is the row that tokens[i] follows; None for a chain."""
    begun: PartialForward | None = None
    """The begun forward of a chain's rows; None if there is none."""
    probs: Sequence[Tensor] = ()
    """draft_probs [vocabulary] that the main path's tokens were drawn from; empty without tests by rejection."""
    steps: int = 0
    """Draft steps of the model; the chain's first tokens come from them."""
    origin: Origin = "skipped"
    """The origin of the tokens that come from these steps."""
    unread: Tensor | None = None
    """Tokens [n] of a chain that are on the device only; `tokens` is empty until they are `read`."""

    @classmethod
    def branching(
        cls,
        chain: list[int],
        siblings: Sequence[Sequence[int]],
        probs: Sequence[Tensor] = (),
        origin: Origin = "skipped",
    ) -> Draft:
        """A chain of one step per token, with other tokens siblings[i], without successors, beside chain[i]."""
        others = [(token, place) for place, tokens in enumerate(siblings) for token in tokens]
        if not others:
            return cls(chain, probs=probs, steps=len(chain), origin=origin)
        return cls(
            tokens=chain + [token for token, _ in others],
            parents=list(range(len(chain))) + [place for _, place in others],
            probs=probs,
            steps=len(chain),
            origin=origin,
        )

    def read(self, tokens: list[int]) -> Draft:
        """Return this draft with the `unread` tokens, once the host has read them."""
        return replace(self, tokens=tokens, unread=None)

    @property
    def main_path(self) -> int:
        """Length of the chain that the tree begins with; only its tokens count as drafted."""
        if self.parents is None:
            return len(self.tokens)
        return next((row for row, parent in enumerate(self.parents) if parent != row), len(self.tokens))

    @property
    def chain(self) -> Draft:
        """The main path alone."""
        length = self.main_path
        if length == len(self.tokens):
            return self
        return Draft(self.tokens[:length], probs=self.probs, steps=self.steps, origin=self.origin)

    def rows(self, pending: int) -> list[int]:
        """The tokens of all rows, the pending one first."""
        return [pending, *self.tokens]

    def paths(self, pending: int) -> list[list[int]]:
        """The path of each row: the tokens from the pending one to its own."""
        paths = [[pending]]
        for row, token in enumerate(self.tokens):
            paths.append([*paths[row if self.parents is None else self.parents[row]], token])
        return paths

    def origins(self, rows: Sequence[int], tokens: int) -> list[Origin]:
        """The origins of a cycle's new tokens, if it accepts `rows`, of which the pending token's is the first."""
        drafted = [self._origin(row) for row in rows[1:]]
        undrafted: list[Origin] = ["plain"] * (tokens - len(drafted))
        return drafted + undrafted

    def _origin(self, row: int) -> Origin:
        # A sibling of a step's token is the model's second choice there.
        parent = row - 1 if self.parents is None else self.parents[row - 1]
        return "guess" if parent >= self.steps else self.origin

    def child(self, row: int, token: int) -> int | None:
        """The row of `token` after `row`; None if it was not drafted there."""
        if self.parents is None:
            return row + 1 if row < len(self.tokens) and self.tokens[row] == token else None
        return next(
            (
                place + 1
                for place, (parent, other) in enumerate(zip(self.parents, self.tokens, strict=True))
                if parent == row and other == token
            ),
            None,
        )


NOTHING = Draft([])


class Drafter(Protocol):
    """Proposes drafts."""

    def drafting(self, session: Session, length: int) -> Work[Draft]:
        """Draft up to `length` tokens after the session's pending one.

        Keys and values are written after the session's committed ones, where verification overwrites them.
        """
        ...
