"""What a source of drafts proposes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ssd_runtime.engine.session import Session
from ssd_runtime.model.runner import Work


@dataclass(frozen=True, slots=True)
class PartialForward:
    """Rows of a draft that have been through the full model's first sub-layers and left their keys there."""

    first: int
    """The sub-layer that comes next."""
    states: Tensor
    """Of the pending token and every drafted one, [1 + drafted, hidden]."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A tree of tokens behind the pending one; most often a chain.

    Verified as rows: row 0 is the pending token, row i + 1 is `tokens[i]`.
    """

    tokens: list[int]
    parents: Sequence[int] | None = None
    """parents[i]: the row that tokens[i] stands behind, at most i; the row before it where there are none given."""
    begun: PartialForward | None = None
    """Chains only."""
    probs: Sequence[Tensor] = ()
    """draft_probs [vocabulary] that each token of the main path was drawn from by itself; empty where none was."""
    steps: int = 0
    """Steps of the model that drafting took."""

    @classmethod
    def branching(cls, chain: list[int], siblings: Sequence[Sequence[int]], probs: Sequence[Tensor] = ()) -> Draft:
        """A chain of a step a token, with other tokens for the place of chain[i] in siblings[i], none continued."""
        others = [(token, place) for place, tokens in enumerate(siblings) for token in tokens]
        if not others:
            return cls(chain, probs=probs, steps=len(chain))
        tokens = [*chain, *(token for token, _ in others)]
        parents = [*range(len(chain)), *(place for _, place in others)]
        return cls(tokens, parents, probs=probs, steps=len(chain))

    @property
    def main_path(self) -> int:
        """Length of the chain that the tree begins with: what counts as drafted, siblings do not."""
        if self.parents is None:
            return len(self.tokens)
        return next((row for row, parent in enumerate(self.parents) if parent != row), len(self.tokens))

    def rows(self, pending: int) -> list[int]:
        """The tokens of all rows."""
        return [pending, *self.tokens]

    def paths(self, pending: int) -> list[list[int]]:
        """For each row the tokens from the pending one to its own."""
        paths = [[pending]]
        for row, token in enumerate(self.tokens):
            paths.append([*paths[row if self.parents is None else self.parents[row]], token])
        return paths

    def child(self, row: int, token: int) -> int | None:
        """The row of `token` behind `row`, if it was drafted there."""
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
    """A source of drafts."""

    def drafting(self, session: Session, pending: int, length: int) -> Work[Draft]:
        """Draft up to `length` tokens after `pending`.

        Keys and values go past the session's committed ones, where verification overwrites them.
        """
        ...
