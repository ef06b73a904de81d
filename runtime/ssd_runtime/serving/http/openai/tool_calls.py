"""Finds tool calls in an answer's text, as it comes: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from uuid import uuid4

from ssd_runtime.engine.sequence.text_stream import beginning_of

OPEN = "<tool_call>"
CLOSE = "</tool_call>"


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool; `arguments` is a JSON object as text."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{uuid4().hex[:24]}")


class ToolCallReader:
    """Splits text into what the user reads and calls; text that is no valid call stays text."""

    def __init__(self, most: int | None = None) -> None:
        """Calls after the first `most` are dropped."""
        self._most = most
        self._held = ""
        self.calls = 0
        """Number of calls so far."""

    def feed(self, text: str) -> list[str | Call]:
        """Add text; returns the parts that are certain by now."""
        self._held += text
        parts = list[str | Call]()
        while (place := self._held.find(OPEN)) >= 0:
            end = self._held.find(CLOSE, place)
            if end < 0:
                parts.append(self._held[:place])
                self._held = self._held[place:]
                return self._kept(parts)
            parts += [self._held[:place], self._read(self._held[place : end + len(CLOSE)])]
            self._held = self._held[end + len(CLOSE) :]
        certain = len(self._held) - beginning_of(self._held, OPEN)
        parts.append(self._held[:certain])
        self._held = self._held[certain:]
        return self._kept(parts)

    def close(self) -> list[str | Call]:
        """The rest at the end of the answer; a call may end there without its closing tag."""
        rest = self._held
        self._held = ""
        return self._kept([self._read(rest) if rest.startswith(OPEN) else rest])

    def _read(self, text: str) -> str | Call:
        """A call from its tagged text, or the text itself if it is none."""
        try:
            value = json.loads(text.removeprefix(OPEN).removesuffix(CLOSE))
        except (ValueError, RecursionError):
            return text
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            return text
        arguments = value.get("arguments", value.get("parameters", {}))
        if not isinstance(arguments, dict):
            return text
        return Call(value["name"], json.dumps(arguments, ensure_ascii=False))

    def _kept(self, parts: list[str | Call]) -> list[str | Call]:
        """Parts without empty text, white space around calls, and calls beyond the limit."""
        kept = list[str | Call]()
        for part in parts:
            if isinstance(part, Call):
                self.calls += 1
                if self._most is None or self.calls <= self._most:
                    kept.append(part)
            elif part.strip() or (part and not self.calls):
                kept.append(part)
        return kept
