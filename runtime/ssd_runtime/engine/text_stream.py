"""From token ids to text, piece by piece, and where a stop string ends it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[list[int]], str]
UNFINISHED = "\ufffd"
"""What decoders put for the bytes of a character that is not complete yet."""
TAIL = 8
"""Tokens decoded together with the new ones, so that spacing between them comes out right."""


class TextStream:
    """Emits text as tokens arrive, holding back incomplete characters and what may be the start of a stop string."""

    def __init__(self, decode: Decode, stops: Sequence[str], write: Callable[[str], None]) -> None:
        self._decode, self._stops, self._write = decode, stops, write
        self._ids: list[int] = []
        self._done = 0
        self._held = ""

    def feed(self, ids: list[int]) -> None:
        """Take in new tokens and write what is certain of their text."""
        self._ids += ids
        new = self._new_text()
        if new.endswith(UNFINISHED):
            return
        self._done = len(self._ids)
        self._held += new
        cut = len(cut_at_stop(self._held, self._stops))
        if cut == len(self._held):
            cut -= max((_overlap(self._held, stop) for stop in self._stops), default=0)
        self._write(self._held[:cut])
        self._held = self._held[cut:]

    def close(self) -> None:
        """Write what was held back, up to a stop string; of a character that was never completed, what it is."""
        self._write(cut_at_stop(self._held + self._new_text(), self._stops))
        self._held, self._done = "", len(self._ids)

    def _new_text(self) -> str:
        start = max(0, self._done - TAIL)
        known, text = self._decode(self._ids[start : self._done]), self._decode(self._ids[start:])
        return text[len(known) :]


def cut_at_stop(text: str, stops: Sequence[str]) -> str:
    """`text` up to the first stop string in it."""
    found = [text.find(stop) for stop in stops]
    return text[: min((place for place in found if place >= 0), default=len(text))]


def stop_condition(decode: Decode, stops: Sequence[str]) -> Callable[[Sequence[int]], bool] | None:
    """A test of whether the text of some new tokens contains a stop string; None when there are no stop strings."""
    if not stops:
        return None
    # The text before was asked about already; a character takes at most 4 tokens, and a stop string ends in the last.
    window = 4 * max(map(len, stops)) + TAIL

    def stopped(ids: Sequence[int]) -> bool:
        text = decode(list(ids[-window:]))
        return any(stop in text for stop in stops)

    return stopped


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
