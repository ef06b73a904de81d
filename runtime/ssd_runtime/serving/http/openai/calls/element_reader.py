"""Finds calls of which each argument is an element, such as `<parameter=city>Ulm</parameter>`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from ssd_runtime.engine.output.text_stream import beginning_of
from ssd_runtime.serving.http.openai.calls.call_forms import CallForm, ElementCall, is_text, properties_of
from ssd_runtime.serving.http.openai.calls.tool_calls import CallReader, MoreArguments, ParsedCall, Part, as_json

BLANK = r"\s*"
SPELLED = {"True": "true", "False": "false", "None": "null"}
"""Values in Python's spelling, in which some templates write them, with their JSON."""
MOST_NAMED = 200
"""Most characters of a name."""


class ElementReader(CallReader):
    """Reads calls of one form; values of strings are taken as they are, others as JSON."""

    def __init__(
        self, form: CallForm, call: ElementCall, tools: Mapping[str, Mapping[str, Any] | None], most: int | None = None
    ) -> None:
        """`form` is as answers show it, with a text before calls; `tools` has the parameters of each tool."""
        super().__init__(most)
        self._tools = tools
        opening = form.opening.strip()
        self._openings = tuple(dict.fromkeys((opening, opening.split()[-1])))
        """The text before calls, and its last word: some models leave the rest out."""
        self._element = re.compile(
            rf"{_loose(call.before_key)}(?P<key>[^<>]{{1,{MOST_NAMED}}}?){_loose(call.after_key)}"
            rf"{_end_of_line(call.after_key.endswith(chr(10)))}(?P<value>(?s:.)*?)"
            rf"{_end_of_line(call.after_value.startswith(chr(10)))}{_loose(call.after_value).removeprefix(BLANK)}"
        )
        begin = "|".join(map(re.escape, self._openings))
        after = f"{_loose(call.before_key)}|{_loose(form.closing)}"
        self._name = re.compile(rf"(?:{begin})?\s*(?P<name>[\w.:-]{{1,64}}){_loose(call.after_name)}(?={after})")
        self._next = re.compile("(?!)" if form.between is None else _loose(form.between))
        self._closing = re.compile(_loose(form.closing))
        self._state = "text"
        self._schemas: Mapping[str, Mapping[str, Any]] = {}
        self._arguments = 0

    def _advance(self, parts: list[Part]) -> bool:
        if self._state == "text":
            places = [place for each in self._openings if (place := self._held.find(each)) >= 0]
            known = min(places) if places else len(self._held)
            known -= 0 if places else max(beginning_of(self._held, each) for each in self._openings)
            parts.append(self._held[:known])
            self._held = self._held[known:]
            self._state = "name" if places else "text"
            return bool(places)
        if self._state == "name":
            return self._read_name(parts)
        if found := self._element.match(self._held):
            more = ", " if self._arguments else ""
            parts.append(
                MoreArguments(f"{more}{json.dumps(found['key'])}: {self._value(found['key'], found['value'])}")
            )
            self._arguments += 1
        elif found := self._next.match(self._held):
            parts.append(MoreArguments("}"))
            self._state = "name"
        elif found := self._closing.match(self._held):
            parts.append(MoreArguments("}"))
            self._state = "text"
        else:
            return False
        self._held = self._held[found.end() :]
        return True

    def _read_name(self, parts: list[Part]) -> bool:
        if (found := self._name.match(self._held)) is None:
            if len(self._held) > len(self._openings[0]) + MOST_NAMED:
                parts.append(self._held)
                self._held = ""
                self._state = "text"
            return False
        self._held = self._held[found.end() :]
        parts += [ParsedCall(found["name"], ""), MoreArguments("{")]
        self._schemas = properties_of(self._tools.get(found["name"]))
        self._arguments = 0
        self._state = "arguments"
        return True

    def _value(self, key: str, text: str) -> str:
        """A value as JSON."""
        if not is_text(self._schemas.get(key, {})):
            try:
                return as_json(json.loads(SPELLED.get(text, text)))
            except (ValueError, RecursionError):
                pass
        return as_json(text)

    def _rest(self) -> list[Part]:
        return [] if self._state == "arguments" else [self._held]


def _loose(text: str) -> str:
    """A pattern of a text, with other white space before and within it."""
    return "".join(BLANK + re.escape(word) for word in text.split())


def _end_of_line(wanted: bool) -> str:
    return r"\n?" if wanted else ""
