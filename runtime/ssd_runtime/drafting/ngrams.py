"""An incremental n-gram index: where the last tokens of a sequence occurred before."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

LONGEST = 8
"""Longest n-gram in the index. Longer matches do not draft better."""


class NgramIndex:
    """Index of the latest end of n-grams of up to `LONGEST` tokens.

    It holds single tokens, and those n-grams whose tokens after the first occur more than once: where such tokens occur
    once, a longer match is found by comparing there.
    """

    __slots__ = ("_earlier", "_ends", "tokens")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}
        self._earlier: list[int] = []
        """Earlier ends of the n-grams that end the sequence now, by length - 1."""

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens to the sequence."""
        for token in tokens:
            self.tokens.append(token)
            end = len(self.tokens)
            self._earlier = []
            for length in range(1, min(LONGEST, end) + 1):
                run = tuple(self.tokens[end - length :])
                before = self._ends.get(run)
                if before is None and self._earlier and length <= self._earlier[-1]:
                    # The shorter n-gram has a second place now, so this length at the first one belongs in the index.
                    first = self._earlier[-1]
                    self._ends.setdefault(tuple(self.tokens[first - length : first]), first)
                    before = self._ends.get(run)
                self._ends[run] = end
                if before is None:
                    break
                self._earlier.append(before)

    def after(self, path: Sequence[int] = ()) -> tuple[int, int]:
        """Find the longest earlier match of the tokens that end the sequence followed by `path`.

        Returns its length and the token that followed it, or (0, -1) without a match. If the match ends where the
        sequence does, the repetition is assumed to go on with `path`.
        """
        if not path:
            return (len(self._earlier), self.tokens[self._earlier[-1]]) if self._earlier else (0, -1)
        recent = (*self.tokens[-LONGEST:], *path)[-LONGEST:]
        found = 0
        end = 0
        for length in range(1, len(recent) + 1):
            at = self._ends.get(recent[-length:])
            if at is None:
                break
            found = length
            end = at
        if not found:
            return 0, -1
        while found < min(len(recent), end) and self.tokens[end - found - 1] == recent[-found - 1]:
            found += 1
        return found, self.tokens[end] if end < len(self.tokens) else path[0]
