"""Turns token ids into text, piece by piece, up to a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[list[int]], str]
UNFINISHED = "\ufffd"
"""The character that decoders emit for an incomplete one."""
TAIL = 8
"""Earlier tokens that are decoded together with the new ones, so that the spacing between them is right."""


class TextStream:
    """Writes text as tokens arrive, but holds back incomplete characters and possible beginnings of a stop string."""

    def __init__(self, decode: Decode, stops: Sequence[str], write: Callable[[str], None]) -> None:
        self._decode = decode
        self._stops = stops
        self._write = write
        self._ids: list[int] = []
        self._done = 0
        """Number of tokens whose text was written or held back."""
        self._held = ""

    def feed(self, ids: list[int]) -> None:
        """Add new tokens and write the part of their text that is certain."""
        self._write(self.skip(ids))

    def skip(self, ids: Sequence[int]) -> str:
        """Add tokens whose text is not written; returns the part of it that is certain."""
        self._ids += ids
        new = self._new_text()
        if new.endswith(UNFINISHED):
            return ""
        self._done = len(self._ids)
        self._held += new
        cut = len(cut_at_stop(self._held, self._stops))
        if cut == len(self._held):
            cut -= max((beginning_of(self._held, stop) for stop in self._stops), default=0)
        certain = self._held[:cut]
        self._held = self._held[cut:]
        return certain

    def close(self) -> None:
        """Write the text that was held back, up to a stop string, incomplete characters included."""
        self._write(cut_at_stop(self._held + self._new_text(), self._stops))
        self._held = ""
        self._done = len(self._ids)

    def _new_text(self) -> str:
        """The text of the tokens that are not done yet."""
        start = max(0, self._done - TAIL)
        known = self._decode(self._ids[start : self._done])
        return self._decode(self._ids[start:])[len(known) :]


def cut_at_stop(text: str, stops: Sequence[str]) -> str:
    """The text up to its first stop string."""
    found = [text.find(stop) for stop in stops]
    return text[: min((place for place in found if place >= 0), default=len(text))]


def stop_condition(decode: Decode, stops: Sequence[str]) -> Callable[[Sequence[int]], bool] | None:
    """Return a test of whether the text of new tokens contains a stop string; None without stop strings."""
    if not stops:
        return None
    # Earlier text was tested already. A stop string ends in the last token, and a character takes at most 4 tokens.
    window = 4 * max(map(len, stops)) + TAIL

    def stopped(ids: Sequence[int]) -> bool:
        text = decode(list(ids[-window:]))
        return any(stop in text for stop in stops)

    return stopped


def beginning_of(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
