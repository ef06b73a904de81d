"""Finds tool calls in an answer's text, as it comes.

Two forms are read: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, of Hermes, Qwen and SmolLM3; and an answer
that is nothing but such an object, or a list of them, of Llama 3 and Mistral, whose marks are special tokens.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from ssd_runtime.engine.output.text_stream import beginning_of

OPEN = "<tool_call>"
CLOSE = "</tool_call>"


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A call of a tool; `arguments` is a JSON object as text."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{uuid4().hex[:24]}")


class ToolCallReader:
    """Splits text into what the user reads and calls; text that is no valid call stays text."""

    def __init__(self, most: int | None = None, bare: Collection[str] = ()) -> None:
        """Calls after the first `most` are dropped.

        Calls of the tools named in `bare` are also read without tags, if the answer is nothing else.
        """
        self._most = most
        self._bare = bare
        self._held = ""
        self._blank = ""
        """White space after a call, which is only kept if text follows it."""
        self.calls = 0
        """Number of calls so far."""

    def feed(self, text: str) -> list[str | ParsedCall]:
        """Add text; returns the parts that are certain by now."""
        self._held += text
        if self._bare:
            if self._held.lstrip()[:1] in ("", "{", "["):
                return []  # whether these are calls is certain at the end alone
            self._bare = ()
        parts = list[str | ParsedCall]()
        while (place := self._held.find(OPEN)) >= 0:
            end = self._held.find(CLOSE, place)
            if end < 0:
                parts.append(self._held[:place])
                self._held = self._held[place:]
                return self._kept(parts)
            parts += [self._held[:place], *_tagged(self._held[place : end + len(CLOSE)])]
            self._held = self._held[end + len(CLOSE) :]
        certain = len(self._held) - beginning_of(self._held, OPEN)
        parts.append(self._held[:certain])
        self._held = self._held[certain:]
        return self._kept(parts)

    def close(self) -> list[str | ParsedCall]:
        """The rest at the end of the answer; a call may end there without its closing tag."""
        parts = list[str | ParsedCall]()
        if self._bare:
            calls = _calls(self._held)
            if calls and all(call.name in self._bare for call in calls):
                self._held = ""
                return self._kept(calls)
            self._bare = ()
            parts += self.feed("")
        rest = self._held
        self._held = ""
        return [*parts, *self._kept(_tagged(rest) if rest.startswith(OPEN) else [rest])]

    def _kept(self, parts: Sequence[str | ParsedCall]) -> list[str | ParsedCall]:
        """Parts without empty text, white space around calls, and calls beyond the limit."""
        kept = list[str | ParsedCall]()
        for part in parts:
            if isinstance(part, ParsedCall):
                self.calls += 1
                self._blank = ""
                if self._most is None or self.calls <= self._most:
                    kept.append(part)
            elif self.calls and not part.strip():
                self._blank += part
            elif part:
                kept.append(self._blank + part)
                self._blank = ""
        return kept


def _tagged(text: str) -> list[str | ParsedCall]:
    """The calls of tagged text, or the text itself if it holds none."""
    return list(_calls(text.removeprefix(OPEN).removesuffix(CLOSE))) or [text]


def _calls(text: str) -> list[ParsedCall]:
    """The calls of a JSON object, or of a list of them; empty if one is no call."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return []
    calls = [_call(each) for each in (value if isinstance(value, list) else [value])]
    return [call for call in calls if call is not None] if None not in calls else []


def _call(value: Any) -> ParsedCall | None:
    """A call from its JSON object; None if it is none."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    return ParsedCall(value["name"], json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None
