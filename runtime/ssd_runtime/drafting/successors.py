"""The token-recycling table: the target's most probable successors of recent tokens."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import TypeVar

RANKS = 4
"""Candidates kept per entry."""
MOST = 1 << 16
"""Most tokens, and most pairs of tokens, in the table; the oldest are dropped."""
Key = TypeVar("Key", int, tuple[int, int])


class Successors:
    """The target's most probable successors of every token and token pair that it has verified lately.

    Verification has computed them anyway (token recycling, Luo et al. 2024; pairs are ours). Only accepted rows are
    stored: successors of rejected tokens are seldom needed, and cost as much.
    """

    __slots__ = ("_by_pair", "_by_token")

    def __init__(self, rows: Iterable[Sequence[int]] = ()) -> None:
        """Start from rows that hold a token pair and its candidates. The first rows are dropped first."""
        self._by_token: OrderedDict[int, list[int]] = OrderedDict()
        self._by_pair: OrderedDict[tuple[int, int], list[int]] = OrderedDict()
        for before, token, *best in rows:
            self.put(before, token, best[:RANKS])

    def update(
        self, before: int, paths: Sequence[Sequence[int]], rows: Sequence[int], candidates: Sequence[list[int]]
    ) -> None:
        """Update the table with the target's candidates after the accepted `rows` of a verification.

        paths[row] are the tokens up to that row, after the token `before`. There are candidates per accepted row, best
        first.
        """
        for row, best in zip(rows, candidates, strict=True):
            path = paths[row]
            if best:  # logits that are NaN have no candidates
                self.put(path[-2] if len(path) > 1 else before, path[-1], best)

    def put(self, before: int, token: int, candidates: list[int]) -> None:
        """Store the candidates after `before` and `token`, best first."""
        _put(self._by_token, token, candidates)
        _put(self._by_pair, (before, token), candidates)

    def of(self, before: int, token: int) -> tuple[Sequence[int], bool]:
        """Candidates after `token`, and whether they belong to the pair (`before`, `token`); empty if unknown."""
        found = self._by_pair.get((before, token))
        return (self._by_token.get(token, ()), False) if found is None else (found, True)

    def rows(self) -> list[list[int]]:
        """Rows of a pair and its candidates, latest pairs last."""
        return [[*pair, *best] for pair, best in self._by_pair.items()]


def _put(table: OrderedDict[Key, list[int]], key: Key, candidates: list[int]) -> None:
    table[key] = candidates
    table.move_to_end(key)
    if len(table) > MOST:
        table.popitem(last=False)
