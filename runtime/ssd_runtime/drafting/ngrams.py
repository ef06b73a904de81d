"""Where the last tokens of a sequence stood before: an index that grows with it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

LONGEST = 8
"""Longest run of tokens that is remembered: longer matches draft no better."""


class NgramIndex:
    """For every run of up to `LONGEST` tokens, where it ended last. A token costs `LONGEST` look-ups, no rescans."""

    __slots__ = ("_earlier", "_ends", "tokens")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}
        self._earlier: list[int] = []
        """Of the runs that end the sequence now, by length - 1: where each had ended before."""

    def extend(self, tokens: Iterable[int]) -> None:
        """The sequence goes on with `tokens`."""
        for token in tokens:
            self.tokens.append(token)
            end, known = len(self.tokens), True
            self._earlier = []
            for length in range(1, min(LONGEST, end) + 1):
                run = tuple(self.tokens[end - length :])
                # A run that stood nowhere before makes every longer one new, too.
                before = self._ends.get(run) if known else None
                known = before is not None
                if before is not None:
                    self._earlier.append(before)
                self._ends[run] = end

    def after(self, path: Sequence[int] = ()) -> tuple[int, int]:
        """What followed the longest run that ends the sequence and then `path`: the run's length, and the token.

        The run's latest earlier place counts; (0, -1) where it has none. Where such a place is the end of the sequence
        itself, `path` is what followed: a repetition is taken to repeat.
        """
        if not path:
            return (len(self._earlier), self.tokens[self._earlier[-1]]) if self._earlier else (0, -1)
        recent = (*self.tokens[-LONGEST:], *path)[-LONGEST:]
        found, end = 0, 0
        for length in range(1, len(recent) + 1):
            at = self._ends.get(recent[-length:])
            if at is None:
                break
            found, end = length, at
        if not found:
            return 0, -1
        return found, self.tokens[end] if end < len(self.tokens) else path[0]
