"""Reads JSON whose parts are counted before any of them is built."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import isinf
from typing import Any

from pydantic_core import from_json

MOST_VALUES = 131_072
"""Values in lists and objects, without those that one prompt's token ids may add."""
MOST_TEXTS = 65_536
"""Texts, the names in objects included."""
MOST_NESTS = 32_768
"""Lists and objects."""
PIECE = 1 << 16
"""Bytes that are looked at in one go; other threads run in between."""


class TooMuch(ValueError):  # noqa: N818 - the client's mistake
    """JSON has more parts than are read."""


def read_json(data: bytes, more_values: int = 0) -> Any:
    """The value that JSON in UTF-8 stands for.

    Raises TooMuch for more than `MOST_VALUES + more_values` values or too many texts, lists and objects; and ValueError
    for what is no JSON, which includes lone surrogates, numbers past the range of floats and more than 200 levels.
    """
    require_few([data], more_values)
    value = from_json(data, allow_inf_nan=False)
    if _has_infinity(value):
        raise ValueError("a number is too large")
    return value


def require_few(texts: Iterable[bytes], more_values: int = 0) -> None:
    """Raise TooMuch if texts of JSON have more parts together than `read_json` reads."""
    # Counting takes milliseconds and little memory. To build millions of parts takes seconds, in which no other thread
    # runs, and more than ten times the memory of the text.
    strings = values = nests = 0
    for data in texts:
        quotes = 0
        for piece in _without_escapes(data):
            parts = piece.split(b'"')
            outside = b"".join(parts[quotes % 2 :: 2])
            quotes += len(parts) - 1
            values += outside.count(b",")
            nests += outside.count(b"[") + outside.count(b"{")
            _check(strings + quotes // 2, MOST_TEXTS, "texts")
            _check(values, MOST_VALUES + more_values, "values")
            _check(nests, MOST_NESTS, "lists and objects")
        strings += quotes // 2


def _has_infinity(value: Any) -> bool:
    """Whether a number such as 1e400 has become infinite: `from_json` refuses the names of infinities alone."""
    left = [value]
    while left:
        each = left.pop()
        if isinstance(each, float) and isinf(each):
            return True
        parts = each.values() if isinstance(each, dict) else each if isinstance(each, list) else ()
        left += [part for part in parts if isinstance(part, float | dict | list)]
    return False


def _without_escapes(data: bytes) -> Iterator[bytes]:
    """The data, piece by piece, without escaped quotes and backslashes: the quotes left begin and end texts."""
    held = b""
    for begin in range(0, len(data), PIECE):
        piece = held + data[begin : begin + PIECE]
        # Backslashes escape each other from the left. The last one of an odd number escapes what comes next.
        end = len(piece) - (len(piece) - len(piece.rstrip(b"\\"))) % 2
        held = piece[end:]
        yield piece[:end].replace(b"\\\\", b"").replace(b'\\"', b"")


def _check(count: int, most: int, what: str) -> None:
    if count > most:
        raise TooMuch(f"it has more than {most} {what}; send less")
