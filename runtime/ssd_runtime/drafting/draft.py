"""What a source of drafts proposes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

from torch import Tensor

from ssd_runtime.session import Session


@dataclass(frozen=True, slots=True)
class Begun:
    """Rows of a draft that have been through the full model's first sub-layers and left their keys there."""

    first: int
    """The sub-layer that comes next."""
    states: Tensor
    """Of the pending token and every drafted one, [1 + drafted, hidden]."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A chain of tokens behind the pending one, with other candidates beside them where the source offers any.

    Verified as rows: the pending token, the chain, then the siblings place by place.
    """

    tokens: list[int]
    siblings: Sequence[Sequence[int]] = ()
    """siblings[i]: other tokens for the place of tokens[i]; none of them is continued."""
    begun: Begun | None = None

    def rows(self, pending: int) -> list[int]:
        """The tokens of all rows."""
        return [pending, *self.tokens, *chain.from_iterable(self.siblings)]

    def sibling_places(self) -> list[int]:
        """For each sibling row, the place in the chain that it is a candidate for."""
        return [place for place, others in enumerate(self.siblings) for _ in others]


NOTHING = Draft([])


class Drafter(Protocol):
    """A source of drafts."""

    def draft(self, session: Session, pending: int, length: int) -> Draft:
        """Up to `length` tokens behind `pending`.

        Keys and values go past the session's committed ones, where verification overwrites them.
        """
        ...
