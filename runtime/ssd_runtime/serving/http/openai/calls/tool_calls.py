"""Finds tool calls in an answer's text, as it comes.

A call is a JSON object with `name` and `arguments` (or `parameters`), or stands in a list of such objects. It is read
after a mark, such as `<tool_call>` of Hermes and Qwen. Where a model's marks are special tokens, which have no text,
calls are read in answers that are nothing else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from ssd_runtime.engine.output.text_stream import beginning_of

MARKS = {
    "<tool_call>": "</tool_call>",
    "<|tool_call|>": "<|/tool_call|>",
    "[TOOL_CALLS]": "",
    "<|python_tag|>": "",
    "functools": "",
    "```tool_call\n": "```",
    "```json\n": "```",
}
"""Marks before calls in the forms of models, and the marks after them."""
BEGIN = re.compile(r'\s*\[?\s*\{\s*"name"\s*:\s*("[^"\\]{1,64}")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
"""The beginning of a call, up to its arguments."""
NEXT = re.compile(r"\s*\}\s*,(?=\s*\{)")
"""The end of a call before another one of its list."""
END = re.compile(r"\s*\}?\s*\]?\s*")
"""The end of the last call, of which a limit may have cut a part."""


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A call of a tool, with the first part of its arguments, which are a JSON object as text."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{uuid4().hex[:24]}")


@dataclass(frozen=True, slots=True)
class MoreArguments:
    """A further part of the latest call's arguments."""

    text: str


Part = str | ParsedCall | MoreArguments


def joined(parts: Sequence[Part]) -> tuple[str, list[ParsedCall]]:
    """The text and the whole calls of an answer's parts."""
    calls = list[ParsedCall]()
    for part in parts:
        if isinstance(part, ParsedCall):
            calls.append(part)
        elif isinstance(part, MoreArguments):
            calls[-1] = ParsedCall(calls[-1].name, calls[-1].arguments + part.text, calls[-1].id)
    return "".join(part for part in parts if isinstance(part, str)), calls


class ToolCallReader:
    """Splits text into what the user reads and calls; text that does not begin a call stays text.

    A call is told once its name is known, and its arguments as they come, valid or not.
    """

    def __init__(self, most: int | None = None, bare: Collection[str] = ()) -> None:
        """Calls after the first `most` are dropped.

        Calls of the tools named in `bare` are also read without marks, if the answer begins with one.
        """
        self._most = most
        self._bare = bare
        self._held = ""
        self._mark: str | None = None
        """The mark whose calls are read; empty for calls without one."""
        self._depth = 0
        """Objects and lists around the next character of the arguments; 0 outside of arguments."""
        self._in_string = False
        self._escaped = False
        self._in_call = False
        self._blank = ""
        """White space after a call, which is only kept if text follows it."""
        self.calls = 0
        """Number of calls so far."""

    def feed(self, text: str) -> list[Part]:
        """Add text; returns the parts that are certain by now."""
        self._held += text
        parts = list[Part]()
        while self._advance(parts):
            pass
        return self._kept(parts)

    def close(self) -> list[Part]:
        """The rest at the end of the answer; a call may end there without its closing mark."""
        parts = list[Part]()
        if self._in_call:
            rest = self._held if self._depth else self._held[_end(self._held) :]
        else:
            calls = [] if self._mark is None else _calls(self._held.removeprefix(self._mark))
            if self._mark == "" and any(call.name not in self._bare for call in calls):
                calls = []
            parts += calls
            rest = "" if calls else self._held
        self._held = ""
        return self._kept([*parts, rest])

    def _advance(self, parts: list[Part]) -> bool:
        """Read one piece of what is held; returns whether more of it may be read now."""
        if self._depth:
            return self._read_arguments(parts)
        if self._in_call:
            return self._read_end(parts)
        if self._mark is None:
            return self._read_text(parts)
        place = len(self._mark)
        if (begin := BEGIN.match(self._held, place)) and (self._mark or json.loads(begin[1]) in self._bare):
            self._begin(begin, parts)
            return True
        closing = MARKS.get(self._mark, "")
        if self._held[place:].lstrip()[:1] not in ("", "{", "["):
            parts.append(self._held[:place])
            self._held = self._held[place:]
        elif closing and (end := self._held.find(closing, place)) >= 0:
            # A call whose parts come in another order, or none.
            parts += _calls(self._held[place:end]) or [self._held[: end + len(closing)]]
            self._held = self._held[end + len(closing) :]
        else:
            return False
        self._mark = None
        return True

    def _read_text(self, parts: list[Part]) -> bool:
        """Read text up to the first mark."""
        if self._bare and self._held.lstrip()[:1] in ("", "{", "["):
            if self._held.strip():
                self._mark = ""
                return True
            return False
        self._bare = ()
        found = [(place, mark) for mark in MARKS if (place := self._held.find(mark)) >= 0]
        if found:
            place, self._mark = min(found)
        else:
            place = len(self._held) - max(beginning_of(self._held, mark) for mark in MARKS)
        parts.append(self._held[:place])
        self._held = self._held[place:]
        return bool(found)

    def _begin(self, begin: re.Match[str], parts: list[Part]) -> None:
        parts.append(ParsedCall(json.loads(begin[1]), ""))
        self._held = self._held[begin.end() + 1 :]
        parts.append(MoreArguments("{"))
        self._depth = 1
        self._in_call = True

    def _read_arguments(self, parts: list[Part]) -> bool:
        for place, letter in enumerate(self._held):
            if self._in_string:
                self._in_string = self._escaped or letter != '"'
                self._escaped = letter == "\\" and not self._escaped
            else:
                self._in_string = letter == '"'
                self._depth += (letter in "{[") - (letter in "}]")
            if not self._depth:
                parts.append(MoreArguments(self._held[: place + 1]))
                self._held = self._held[place + 1 :]
                return True
        parts.append(MoreArguments(self._held))
        self._held = ""
        return False

    def _read_end(self, parts: list[Part]) -> bool:
        """Read what follows arguments: another call of a list, or the closing mark."""
        assert self._mark is not None, "a call is being read"
        if (after := NEXT.match(self._held)) and (begin := BEGIN.match(self._held, after.end())):
            self._begin(begin, parts)
            return True
        closing = MARKS.get(self._mark, "")
        if not closing or (end := self._held.find(closing)) < 0:
            return False
        parts.append(self._held[_end(self._held) : end])
        self._held = self._held[end + len(closing) :]
        self._in_call = False
        self._mark = None
        return True

    def _kept(self, parts: Sequence[Part]) -> list[Part]:
        """Parts without empty text, white space around calls, and calls beyond the limit."""
        kept = list[Part]()
        for part in parts:
            if isinstance(part, str):
                if self.calls and not part.strip():
                    self._blank += part
                elif part:
                    kept.append(self._blank + part)
                    self._blank = ""
                continue
            if isinstance(part, ParsedCall):
                self.calls += 1
                self._blank = ""
            if self._most is not None and self.calls > self._most:
                continue
            if isinstance(part, MoreArguments) and kept and isinstance(last := kept[-1], MoreArguments | ParsedCall):
                kept[-1] = _extended(last, part.text)
            elif part != MoreArguments(""):
                kept.append(part)
        return kept


def _extended(part: ParsedCall | MoreArguments, text: str) -> ParsedCall | MoreArguments:
    if isinstance(part, MoreArguments):
        return MoreArguments(part.text + text)
    return ParsedCall(part.name, part.arguments + text, part.id)


def _end(text: str) -> int:
    """Length of what ends a call."""
    found = END.match(text)
    return found.end() if found is not None else 0


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
