"""Text that a terminal shows as it is: no control characters, escapes, line breaks or marks that reorder a line."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

MAX_TEXT = 2048
"""Most characters of one text in a bundle: a file path, or the name of a model or a processor."""
UNFINISHED = "\ufffd"
"""The character that decoders of tokens show for one whose bytes are not complete."""
CHARACTER = 4
"""Most tokens of a character that a vocabulary lacks: its bytes."""


def printable(text: str) -> str:
    """The text with white space collapsed and every character that cannot be printed replaced by `?`."""
    return "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))


def _require_printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("expected text without control characters")
    return text


Printable = Annotated[str, Field(max_length=MAX_TEXT), AfterValidator(_require_printable)]
"""A text from a file that others may have written."""
