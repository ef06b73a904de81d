"""Server-sent events of streamed answers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

Json = dict[str, Any]
PREFIX = "data: "
DONE = f"{PREFIX}[DONE]\n\n"
"""The event that ends every stream."""
LINE_ENDS = {code: f"\\u{code:04x}" for code in (0x85, 0x2028, 0x2029)}
"""Escapes of characters that end a line for some clients, which read events line by line."""


def event_of(value: Mapping[str, Any], kind: str | None = None) -> str:
    """The event that carries a JSON object, under the name of its kind if it has one."""
    named = "" if kind is None else f"event: {kind}\n"
    return f"{named}{PREFIX}{json_text(value)}\n\n"


async def events_of(chunks: AsyncIterator[Sequence[Mapping[str, Any]]]) -> AsyncIterator[str]:
    """The events of a stream's chunks, and its end; those that are yielded together stay together."""
    async for together in chunks:
        yield "".join(map(event_of, together))
    yield DONE


def json_text(value: Any) -> str:
    """The JSON of a value. Raises ValueError for infinities and NaN, which JSON has no numbers for."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.translate(LINE_ENDS)
