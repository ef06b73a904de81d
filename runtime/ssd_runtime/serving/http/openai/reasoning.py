"""Splits what a model thinks from its answer, as the text comes."""

from __future__ import annotations

from ssd_runtime.engine.output.text_stream import beginning_of

OPEN = "<think>"
CLOSE = "</think>"


class ReasoningReader:
    """Reads text that may begin with thoughts between `<think>` and `</think>`, without the blanks around them."""

    def __init__(self, thinks: bool) -> None:
        """`thinks` says that the prompt has opened the thoughts."""
        self._begun = thinks
        self._thinking = thinks
        self._silent = True
        """Whether no thought has come yet."""
        self._held = ""

    def feed(self, text: str) -> tuple[str, str]:
        """Add text; returns the thoughts and the answer that are certain by now."""
        self._held += text
        if not self._begun:
            start = self._held.lstrip()
            if OPEN.startswith(start[: len(OPEN)]) and len(start) < len(OPEN):
                return "", ""
            self._begun = True
            self._thinking = start.startswith(OPEN)
            self._held = start.removeprefix(OPEN) if self._thinking else self._held
        if not self._thinking:
            return "", self._take(len(self._held))
        end = self._held.find(CLOSE)
        if end < 0:
            # Blanks before the end are no thought, nor is what may begin the end.
            certain = self._held[: len(self._held) - beginning_of(self._held, CLOSE)].rstrip()
            return self._thought(len(certain)), ""
        answer = self._held[end + len(CLOSE) :].lstrip()
        thoughts = self._thought(len(self._held[:end].rstrip()))
        if answer:
            self._held = ""
            self._thinking = False
        return thoughts, answer

    def close(self) -> tuple[str, str]:
        """The rest at the end of the text."""
        if not self._thinking:
            return "", self._take(len(self._held))
        return self._thought(len(self._held.partition(CLOSE)[0].rstrip())), ""

    def _thought(self, length: int) -> str:
        thought = self._take(length)
        if self._silent:
            thought = thought.lstrip()
            self._silent = not thought
        return thought

    def _take(self, length: int) -> str:
        taken = self._held[:length]
        self._held = self._held[length:]
        return taken
