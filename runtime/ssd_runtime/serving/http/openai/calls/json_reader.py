"""Finds calls of which the arguments are a JSON object.

A call is a JSON object with `name` and `arguments` (or `parameters`), or stands in a list of such objects; of some
models, the tool's name stands before its arguments. It is read after a mark, such as `<tool_call>` of Hermes and Qwen.
Where a model's marks are control tokens, which have no text, calls are read in answers that are nothing else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any

from ssd_profiles.prompts import is_text
from ssd_runtime.serving.http.openai.calls.call_forms import MOST_NAME, TAGGED, CallForm, NamedCall, loose
from ssd_runtime.serving.http.openai.calls.tool_calls import CallReader, MoreArguments, ParsedCall, Part, as_json

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
COMMON = ("", "functools", "```tool_call\n", "```json\n")
"""Marks, and none, that other text has too: what follows is a call if it names a tool."""
BEGIN = re.compile(
    rf'\s*(?:\[\s*)?\{{\s*"name"\s*:\s*("[^"\\\x00-\x1f]{{1,{MOST_NAME}}}")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{{)'
)
"""The beginning of a call, up to its arguments."""
OTHER_JSON = re.compile(
    r'\[\s*[^\s{]|(?:\[\s*)?\{\s*(?:"(?:type|id)"\s*:\s*(?:"[^"\\]{0,64}"|\d{1,20})\s*,\s*){0,4}'
    r'(?:[^\s"]|"(?!(?:name|arguments|parameters|type|id)")(?:[^"\\]{0,64}"|[^"\\]{65})'
    r'|"name"\s*:\s*(?:[^\s"]|"(?P<name>[^"\\]{0,64})"|"[^"\\]{65})'
    r'|"(?:type|id)"\s*:\s*(?:"[^"\\]{65}|\d{21}))'
)
"""The beginning of JSON that is no call, unless its `name` is a tool's: the first key but `type` and `id` tells, or a
key or a value that is longer than a call's. All is bounded, since text that decides nothing is read with every piece.
"""
OBJECT_END = r'\s*(?:,\s*"id"\s*:\s*"[^"]{0,64}"\s*)?\}'
NEXT = re.compile(OBJECT_END + r"\s*,(?=\s*\{)")
"""The end of a call before another one of its list."""
END = re.compile(rf"(?:{OBJECT_END})?\s*\]?\s*")
"""The end of the last call, of which a limit may have cut a part."""
MOST_NAMED = 100
"""Most characters before the arguments of a call that begins with the tool's name."""


class JsonReader(CallReader):
    """Reads calls in the forms that `MARKS` begin, and in a form of the model's own."""

    def __init__(self, form: CallForm = TAGGED, tools: Collection[str] = (), most: int | None = None) -> None:
        """`form` is as answers show it; if no mark begins it, calls of `tools` are read without one."""
        super().__init__(most)
        mark = form.opening.strip().removesuffix("[").rstrip()
        closing = form.closing.strip().removeprefix("]").lstrip()
        self._closings = {mark: closing, **MARKS}
        self._marks = [each for each in self._closings if each]
        self._bare: Collection[str] = () if mark else tools
        self._named = isinstance(form.call, NamedCall)
        self._names = sorted(tools, key=len, reverse=True)
        self._begin_of, self._next, self._end = BEGIN, NEXT, END
        if isinstance(form.call, NamedCall):
            names = "|".join(map(re.escape, self._names)) or "(?!)"
            self._begin_of = re.compile(rf"\s*({names}){loose(form.call.after_name)}\s*(?=\{{)")
            self._next = re.compile(loose(form.between or ""))
            self._end = re.compile(r"\s*")
        self._mark: str | None = None
        """The mark whose calls are read; empty for calls without one."""
        self._depth = 0
        """Objects and lists around the next character of the arguments; 0 outside of arguments."""
        self._in_string = False
        self._escaped = False
        self._in_call = False

    def _rest(self) -> list[Part]:
        if self._in_call:
            return [self._held if self._depth else self._held[self._end.match(self._held).end() :]]  # type: ignore[union-attr]
        calls = [] if self._mark is None or self._named else self._calls(self._held.removeprefix(self._mark))
        return [*calls] or [self._held]

    def _advance(self, parts: list[Part]) -> bool:
        if self._depth:
            return self._read_arguments(parts)
        if self._in_call:
            return self._read_end(parts)
        if self._mark is None:
            return self._read_text(parts)
        place = len(self._mark)
        if (begin := self._begin_of.match(self._held, place)) and self._may_name(self._name(begin)):
            self._begin(begin, parts)
            return True
        closing = self._closings[self._mark]
        if not self._may_begin(self._held[place:].lstrip()):
            parts.append(self._held[:place])
            self._held = self._held[place:]
        elif closing and not self._named and (end := self._held.find(closing, place)) >= 0:
            # A call whose parts come in another order, or none.
            parts += self._calls(self._held[place:end]) or [self._held[: end + len(closing)]]
            self._held = self._held[end + len(closing) :]
        else:
            return False
        self._bare = self._bare if self._mark else ()
        self._mark = None
        return True

    def _name(self, begin: re.Match[str]) -> str:
        return begin[1] if self._named else json.loads(begin[1])

    def _may_name(self, name: str) -> bool:
        """Whether a call after the mark may have this name."""
        return self._mark not in COMMON or name in self._names

    def _calls(self, text: str) -> list[ParsedCall]:
        """The calls of a JSON object, or of a list of them; empty if one is no call."""
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return []
        calls = [_call(each) for each in (value if isinstance(value, list) else [value])]
        found = [call for call in calls if call is not None and self._may_name(call.name)]
        return found if len(found) == len(calls) else []

    def _may_begin(self, text: str) -> bool:
        """Whether a call may begin like this."""
        if not self._named:
            other = OTHER_JSON.match(text) if (self._mark or "") in COMMON else None
            return text[:1] in ("", "{", "[") and (other is None or other["name"] in self._names)
        begun = any(name.startswith(text[: len(name)]) for name in self._names)
        return begun and (len(text) < MOST_NAMED or self._begin_of.match(text) is not None)

    def _read_text(self, parts: list[Part]) -> bool:
        """Read text up to the first mark."""
        if self._bare and self._may_begin(self._held.lstrip()):
            if self._held.strip():
                self._mark = ""
                return True
            return False
        self._bare = ()
        self._mark = self._read_to(self._marks, parts)
        return self._mark is not None

    def _begin(self, begin: re.Match[str], parts: list[Part]) -> None:
        parts += [ParsedCall(self._name(begin), ""), MoreArguments("{")]
        self._held = self._held[begin.end() + 1 :]
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
        """Read what follows arguments: another call, or the closing mark."""
        assert self._mark is not None, "a call is being read"
        if (after := self._next.match(self._held)) and (begin := self._begin_of.match(self._held, after.end())):
            self._begin(begin, parts)
            return True
        closing = self._closings[self._mark]
        if not closing or (end := self._held.find(closing)) < 0:
            return False
        parts.append(self._held[self._end.match(self._held).end() : end])  # type: ignore[union-attr]
        self._held = self._held[end + len(closing) :]
        self._in_call = False
        self._mark = None
        return True


def _call(value: Any) -> ParsedCall | None:
    """A call from its JSON object; None if it is none, or has half a character in its name."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not is_text(value["name"]):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    return ParsedCall(value["name"], as_json(arguments)) if isinstance(arguments, dict) else None
