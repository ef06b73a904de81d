"""Finds calls of which each argument is an element, such as `<parameter=city>Ulm</parameter>`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from ssd_runtime.serving.http.openai.calls.call_forms import (
    KEY,
    MOST_NAME,
    CallForm,
    ElementCall,
    loose,
    only_strings,
    properties_of,
    types_of,
)
from ssd_runtime.serving.http.openai.calls.tool_calls import CallReader, MoreArguments, ParsedCall, Part, as_json

SPELLED = {"True": "true", "False": "false", "None": "null"}
"""Values in Python's spelling, in which some templates write them, with their JSON."""
JSON_TYPES: dict[type, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    type(None): "null",
    list: "array",
    dict: "object",
}
"""JSON's names of the types of values."""
MOST_AROUND = 200
"""Most characters after the text before calls up to the end of a call's name, and of texts around values."""


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
        self._key = re.compile(rf"{loose(call.before_key)}(?P<key>{KEY}?){loose(call.after_key)}")
        begin = "|".join(map(re.escape, self._openings))
        words = form.closing.split()
        own = next((place for place, word in enumerate(words) if word not in call.before_key.split()), len(words))
        self._end_of_call = re.compile(loose(" ".join(words[: own + 1])))
        """The beginning of the closing up to its first word of its own: some models leave the rest out."""
        optional = "".join(f"(?:{loose(word)})?" for word in words[:-1])
        self._closing = re.compile(optional + loose("".join(words[-1:])))
        """The closing, or at least its last word."""
        after = f"{loose(call.before_key)}|{self._end_of_call.pattern}|{self._closing.pattern}"
        word = re.escape(call.after_value.strip())
        lined = call.after_value.startswith("\n")
        self._end_of_value = re.compile(rf"\n{word}|{word}(?={after})" if lined else word)
        """The text after a value. Without the line feed that should stand there, it is one if something follows that
        follows values: a value may have the word itself."""
        self._before_value = call.after_key[len(call.after_key.rstrip("\n")) :]
        self._name = re.compile(
            rf"(?:{begin})?\s*(?P<name>[\w.:-]{{1,{MOST_NAME}}}){loose(call.after_name)}(?={after})"
        )
        self._next = re.compile("(?!)" if form.between is None else loose(form.between))
        self._searched = 0
        """The first place in the held text at which an element's end was not searched for yet."""
        self._state = "text"
        self._schemas: Mapping[str, Mapping[str, Any]] = {}
        self._arguments = 0

    def _advance(self, parts: list[Part]) -> bool:
        if self._state == "text":
            if self._read_to(self._openings, parts) is None:
                return False
            self._state = "name"
            return True
        if self._state == "name":
            return self._read_name(parts)
        if self._read_element(parts):
            return True
        if found := self._next.match(self._held):
            parts.append(MoreArguments("}"))
            self._state = "name"
        elif found := self._closing.match(self._held):
            parts.append(MoreArguments("}"))
            self._state = "text"
        else:
            return False
        self._held = self._held[found.end() :]
        self._searched = 0
        return True

    def _read_element(self, parts: list[Part]) -> bool:
        """Read an element once it is whole."""
        if (begin := self._key.match(self._held)) is None:
            return False
        end = self._end_of_value.search(self._held, max(begin.end(), self._searched))
        self._searched = max(0, len(self._held) - MOST_AROUND)
        if end is None:
            return False
        value = self._held[begin.end() : end.start()].removeprefix(self._before_value)
        more = ", " if self._arguments else ""
        parts.append(MoreArguments(f"{more}{json.dumps(begin['key'])}: {self._value(begin['key'], value)}"))
        self._arguments += 1
        self._held = self._held[end.end() :]
        self._searched = 0
        return True

    def _read_name(self, parts: list[Part]) -> bool:
        if (found := self._name.match(self._held)) is None:
            if len(self._held) > len(self._openings[0]) + MOST_AROUND:
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
        if not only_strings(self._schemas.get(key, {})):
            value = SPELLED.get(text, text)
            try:
                # NaN and Infinity, for which `int` raises ValueError, are no JSON, though Python reads them.
                kind = JSON_TYPES[type(json.loads(value, parse_constant=int))]
                types = types_of(self._schemas.get(key, {}))
                # A postcode may look like a number.
                if kind == "string" or kind in types or "string" not in types:
                    return value
            except (ValueError, RecursionError):
                pass
        return as_json(text)

    def _rest(self) -> list[Part]:
        if self._state != "arguments":
            return [self._held]
        ended = self._end_of_call.match(self._held)
        return [] if ended is None else [MoreArguments("}"), self._held[ended.end() :]]
