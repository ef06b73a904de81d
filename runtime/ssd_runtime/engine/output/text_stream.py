"""Turns token ids into text, piece by piece, up to a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ssd_profiles.printable import CHARACTER, UNFINISHED

Decode = Callable[[list[int]], str]
MOST_HELD = 64
"""Most tokens that are held back because each ends within a character."""
TAIL = 8
"""Earlier tokens that are decoded together with the new ones, so that the spacing between them is right."""


class TextStream:
    """Writes text as tokens arrive, but holds back incomplete characters and possible beginnings of a stop string.

    Without `write`, for whoever wants the whole answer only, no token is decoded on its way.
    """

    def __init__(self, decode: Decode, stops: Sequence[str], write: Callable[[str], None] | None) -> None:
        self._decode = decode
        self._stops = stops
        self._write = write
        self._ids: list[int] = []
        self._done = 0
        """Number of tokens whose text was written or held back."""
        self._held = ""

    def feed(self, ids: list[int]) -> None:
        """Add new tokens and write the part of their text that is certain."""
        if self._write is not None:
            self._write(self.skip(ids))

    def skip(self, ids: Sequence[int]) -> str:
        """Add tokens whose text is not written; returns the part of it that is certain.

        One after the other: what is certain of broken characters depends on the tokens that are known by then, and must
        not on how many came at once.
        """
        return "".join([self._skipped(token) for token in ids])

    def _skipped(self, token: int) -> str:
        self._ids.append(token)
        self._held += self._new_text(CHARACTER - 1)
        cut = len(cut_at_stop(self._held, self._stops))
        if cut == len(self._held):
            cut -= max((beginning_of(self._held, stop) for stop in self._stops), default=0)
        certain = self._held[:cut]
        self._held = self._held[cut:]
        return certain

    def close(self) -> None:
        """Write the text that was held back, up to a stop string, incomplete characters included."""
        if self._write is not None:
            self._write(cut_at_stop(self._held + self._new_text(0), self._stops))
        self._held = ""

    def _new_text(self, most_open: int) -> str:
        """The text of the tokens that are not done yet, but for up to `most_open` that begin a character."""
        start, known = _end_of(self._decode, self._ids, self._done, TAIL)
        end = len(self._ids)
        least = max(self._done, end - most_open)
        whole = text = self._decode(self._ids[start:end])
        while text.endswith(UNFINISHED) and end > least:
            end -= 1
            text = self._decode(self._ids[start:end])
        if not whole.startswith(text) and len(self._ids) - self._done <= MOST_HELD:
            return ""  # tokens end one character and begin the next
        self._done = end
        return text[len(known) :]


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
        _, text = _end_of(decode, ids, len(ids), window)
        return any(stop in text for stop in stops)

    return stopped


def _end_of(decode: Decode, ids: Sequence[int], end: int, window: int) -> tuple[int, str]:
    """The text of the last `window` tokens before `end`, and where these begin.

    They begin earlier if the first one is within a character, whose part would spoil the text of whole ones after it.
    """
    start = max(0, end - window)
    least = max(0, start - CHARACTER + 1)
    while (text := decode(list(ids[start:end]))).startswith(UNFINISHED) and start > least:
        start -= 1
    return start, text


def beginning_of(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
