"""What the target held for probable behind a token when it last stood there."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import TypeVar

from torch import Tensor

from ssd_runtime.sampling.argmax import candidates

RANKS = 4
"""Candidates that are kept."""
MOST = 1 << 16
"""Tokens, and pairs of tokens, that are remembered; the oldest are forgotten."""
Key = TypeVar("Key", int, tuple[int, int])


class Successors:
    """The target's best candidates behind every token and pair of tokens that it has verified lately.

    Verification has computed them already; nothing else has to be run for them (token recycling, Luo et al. 2024; pairs
    are ours). Rows that stand are taken: what is known behind rejected ones is seldom asked for, and costs as much.
    """

    __slots__ = ("_by_pair", "_by_token")

    def __init__(self, rows: Iterable[Sequence[int]] = ()) -> None:
        """With what is known beforehand, a pair and its candidates a row; the first rows are forgotten first."""
        self._by_token: OrderedDict[int, list[int]] = OrderedDict()
        self._by_pair: OrderedDict[tuple[int, int], list[int]] = OrderedDict()
        for before, token, *best in rows:
            self.update(before, token, best[:RANKS])

    def verified(self, before: int, paths: Sequence[Sequence[int]], rows: Sequence[int], logits: Tensor) -> None:
        """Take in a verification: `rows` of its `logits` [n, vocabulary], whose paths stand behind the token `before`.

        paths[row] is the row's own.
        """
        for row, best in zip(rows, candidates(logits, rows, RANKS), strict=True):
            path = paths[row]
            if best:  # of logits that are no numbers, nothing is
                self.update(path[-2] if len(path) > 1 else before, path[-1], best)

    def update(self, before: int, token: int, candidates: list[int]) -> None:
        """Behind `before` and then `token` the target's candidates are these, best first."""
        _put(self._by_token, token, candidates)
        _put(self._by_pair, (before, token), candidates)

    def of(self, before: int, token: int) -> tuple[Sequence[int], bool]:
        """Candidates behind `token`, and whether they are those behind both; none where it was never seen."""
        found = self._by_pair.get((before, token))
        return (self._by_token.get(token, ()), False) if found is None else (found, True)

    def rows(self) -> list[list[int]]:
        """Each pair with its candidates, those seen last at the end."""
        return [[*pair, *best] for pair, best in self._by_pair.items()]


def _put(table: OrderedDict[Key, list[int]], key: Key, candidates: list[int]) -> None:
    table[key] = candidates
    table.move_to_end(key)
    if len(table) > MOST:
        table.popitem(last=False)
