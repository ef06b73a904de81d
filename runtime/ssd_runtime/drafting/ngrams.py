"""An incremental n-gram index: where the last tokens of a sequence occurred before."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

LONGEST = 8
"""Longest n-gram in the index. Longer matches do not draft better."""


class NgramIndex:
    """Index of the latest end of every n-gram of up to `LONGEST` tokens; a new token costs `LONGEST` look-ups."""

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
            known = True
            self._earlier = []
            for length in range(1, min(LONGEST, end) + 1):
                run = tuple(self.tokens[end - length :])
                # If an n-gram is new, every longer one is new as well.
                before = self._ends.get(run) if known else None
                known = before is not None
                if before is not None:
                    self._earlier.append(before)
                self._ends[run] = end

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
        return found, self.tokens[end] if end < len(self.tokens) else path[0]
