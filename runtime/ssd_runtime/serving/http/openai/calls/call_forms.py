"""The forms in which models write tool calls, and the grammars of answers that must have some."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ssd_runtime.loading.prompt_tokens import any_of
from ssd_runtime.structure.structure import STYLE, Structure, StructureError, quoted, whole_numbers

MOST_NAME = 64
"""Most characters of a tool's name."""
KEY = "[^<>]{1,200}"
"""Pattern of keys that elements may have."""
UNSERVED = {
    *("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "not", "if", "const", "enum", "minProperties", "maxProperties"),
    *("dependencies", "dependentRequired", "dependentSchemas", "patternProperties", "propertyNames"),
}
"""Keywords by which more is asked of the arguments together than what each of them is, and whether it is there."""
OTHER_REFERENCE = re.compile(r'"\$ref": "(?!#/(\$defs|definitions)/)')
EMPTY: Mapping[str, Any] = {"type": "object"}
ToolSchemas = Sequence[tuple[str, Mapping[str, Any] | None]]
"""Names and parameters of tools; parameters are a JSON schema, or None without any."""


@dataclass(frozen=True, slots=True)
class JsonCall:
    """A JSON object with the members `name` and `arguments`."""

    arguments: str = "arguments"

    def rules(self, rule: str, name: str, parameters: Mapping[str, Any], grammar: _Grammar) -> list[str]:
        """Rules for a call of a tool, the first of which is called `rule`."""
        # Texts are read piece by piece, the longest first: longer pieces would hide those of other JSON.
        pieces = ("{", '"name"', ": ", json.dumps(name), ", ", f'"{self.arguments}"', ": ")
        return [
            f"{rule}: {' '.join(map(quoted, pieces))} {rule}_0 {quoted('}')}",
            f"{rule}_0: %json {_styled(parameters)}",
        ]


@dataclass(frozen=True, slots=True)
class NamedCall:
    """The tool's name, some text, and the arguments as a JSON object."""

    after_name: str

    def rules(self, rule: str, name: str, parameters: Mapping[str, Any], grammar: _Grammar) -> list[str]:
        """Rules for a call of a tool, the first of which is called `rule`."""
        return [f"{rule}: {grammar.text(name + self.after_name)} {rule}_0", f"{rule}_0: %json {_styled(parameters)}"]


@dataclass(frozen=True, slots=True)
class ElementCall:
    """The tool's name, and an element per argument: strings as they are, other values as JSON."""

    after_name: str
    before_key: str
    after_key: str
    after_value: str

    def rules(self, rule: str, name: str, parameters: Mapping[str, Any], grammar: _Grammar) -> list[str]:
        """Rules for a call of a tool, the first of which is called `rule`.

        Raises StructureError for what cannot be promised here, such as strings with a pattern or a format.
        """
        elements, rules = "", list[str]()
        required, properties = parameters.get("required"), properties_of(parameters)
        if unserved := UNSERVED & parameters.keys():
            raise _unserved(name, min(unserved))
        if isinstance(required, list) and any(key not in list(properties) for key in required):
            raise _unserved(name, "required argument outside of its properties")
        for number, (key, schema) in enumerate(properties.items()):
            if re.fullmatch(KEY, key) is None or key != key.strip():
                raise StructureError(f"structure: {key!r} is no name for an argument in this model's calls; change it")
            element = f"{rule}_{number}"
            optional = "" if isinstance(required, list) and key in required else "?"
            elements += f" {element}{optional}"
            if only_strings(schema):
                rules.append(f"{element}: {grammar.text(self.before_key + key + self.after_key)} {element}_v")
                rules += self._text(f"{element}_v", key, schema, grammar)
            else:
                schema = {**schema, **{at: parameters[at] for at in ("$defs", "definitions") if at in parameters}}
                written = json.dumps(schema)
                if OTHER_REFERENCE.search(written):
                    raise _unserved(key, "reference beyond $defs and definitions")
                if self.after_value.rstrip() in written:
                    raise _unserved(key, "value with the text after values")
                opening = grammar.text(self.before_key + key + self.after_key)
                rules.append(f"{element}: {opening} {element}_v {grammar.text(self.after_value)}")
                rules.append(f"{element}_v: %json {_styled(schema)}")
        return [f"{rule}: {grammar.text(name + self.after_name)}{elements}", *rules]

    def _text(self, rule: str, key: str, schema: Mapping[str, Any], grammar: _Grammar) -> list[str]:
        """A rule for a string and the text after it."""
        if unserved := {"pattern", "format"} & schema.keys():
            raise _unserved(key, min(unserved))
        if "enum" in schema or "const" in schema:
            texts = [schema["const"]] if "const" in schema else schema["enum"]
            if any(self.after_value.rstrip() in self.after_key[-1:] + text for text in texts):
                raise _unserved(key, "value with the text after values")
            return [f"{rule}: ({' | '.join(map(grammar.text, texts))}) {grammar.text(self.after_value)}"]
        least, most = schema.get("minLength", 0), schema.get("maxLength", "")
        if any(type(length) is not int or length < 0 for length in (least, most or 0)):
            raise StructureError(f"structure: {key!r} has a length that is no whole number; change it")
        return [f"{rule}[suffix={quoted(self.after_value)}]: /(.|\\n){{{least},{most}}}/"]


@dataclass(frozen=True, slots=True)
class CallForm:
    """The texts around calls, and the form of each."""

    opening: str = ""
    between: str | None = None
    """Text between two calls; None for a model that writes only one."""
    closing: str = ""
    call: JsonCall | NamedCall | ElementCall = JsonCall()

    def structure(
        self,
        tools: ToolSchemas,
        parallel: bool,
        tokens: Mapping[str, int] | None = None,
        otherwise: Mapping[str, Any] | None = None,
    ) -> Structure:
        """Answers that are calls of `tools`, several with `parallel`, or else JSON by the schema `otherwise`.

        `tokens` has the ids of added tokens by their texts. Raises StructureError for tools that take too many
        characters, or that the form cannot express.
        """
        grammar = _Grammar(tokens or {})
        rules = ["start: calls" if otherwise is None else "start: calls | answer"]
        if otherwise is not None:
            rules.append(f"answer: %json {_styled(otherwise)}")
        more = f"({grammar.text(self.between)} call)*" if parallel and self.between is not None else ""
        rules.append(f"calls: {grammar.text(self.opening)} call {more} {grammar.text(self.closing)}")
        rules.append(f"call: {' | '.join(f'call{number}' for number in range(len(tools)))}")
        for number, (name, parameters) in enumerate(tools):
            rules += self.call.rules(f"call{number}", name, whole_numbers({**EMPTY, **(parameters or {})}), grammar)
        return Structure("grammar", "\n".join(rules) + "\n")

    def visible(self, control: Mapping[str, int]) -> CallForm:
        """The form as answers show it, in which control tokens have no text."""
        hidden = partial(_parts_of(control).sub, "")
        call = self.call
        if isinstance(call, NamedCall):
            call = NamedCall(hidden(call.after_name))
        elif isinstance(call, ElementCall):
            call = ElementCall(*map(hidden, (call.after_name, call.before_key, call.after_key, call.after_value)))
        between = None if self.between is None else hidden(self.between)
        return CallForm(hidden(self.opening), between, hidden(self.closing), call)


def properties_of(parameters: Mapping[str, Any] | None) -> dict[str, Mapping[str, Any]]:
    """The schema of each argument of a tool; an empty one, which allows anything, for what is no object."""
    found = (parameters or {}).get("properties")
    named = found.items() if isinstance(found, Mapping) else ()
    return {key: schema if isinstance(schema, Mapping) else {} for key, schema in named}


def only_strings(schema: Mapping[str, Any]) -> bool:
    """Whether all values of a schema are strings."""
    if "enum" in schema or "const" in schema:
        values = [schema["const"]] if "const" in schema else schema["enum"]
        return isinstance(values, list) and bool(values) and all(isinstance(value, str) for value in values)
    return schema.get("type") == "string"


def types_of(schema: Mapping[str, Any]) -> set[str]:
    """The types that a schema names, in its alternatives too; empty if it names none."""
    named = schema.get("type")
    types = set(named) if isinstance(named, list) else {named} if isinstance(named, str) else set[str]()
    for alternatives in (schema.get("anyOf"), schema.get("oneOf")):
        for each in alternatives if isinstance(alternatives, list) else ():
            types |= types_of(each) if isinstance(each, Mapping) else set()
    return types | ({"integer"} if "number" in types else set())


def loose(text: str) -> str:
    """A pattern of a form's text, with other white space before and within it, and with other ids."""
    return "".join(r"\s*" + re.sub(r"abcdefgh\d", r"\\w+", re.escape(word)) for word in text.split())


def _unserved(name: str, what: str) -> StructureError:
    return StructureError(f"structure: {name!r} has a {what}, which this model's form of calls cannot promise; omit it")


class _Grammar:
    """Writes texts of a grammar in Lark's notation, in which added tokens are named by their ids."""

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self._tokens = tokens
        self._found = _parts_of(tokens)

    def text(self, text: str) -> str:
        """The notation of a text; empty for an empty one."""
        parts = (part for part in re.split(f"({self._found.pattern})", text) if part)
        return " ".join(f"<[{self._tokens[part]}]>" if part in self._tokens else quoted(part) for part in parts)


def _parts_of(tokens: Mapping[str, int]) -> re.Pattern[str]:
    """A pattern of the texts of tokens; white space is no mark."""
    return re.compile(any_of(text for text in tokens if text.strip()))


def _styled(schema: Mapping[str, Any]) -> str:
    return json.dumps({"x-guidance": STYLE, **schema})


TAGGED = CallForm("<tool_call>\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>")
"""The form of Hermes and Qwen2.5."""
BARE = CallForm(call=JsonCall("parameters"))
"""The form of Llama 3."""
LISTED = CallForm("<|tool_call|>[", ", ", "]")
"""The form of Granite 3 and Phi-4."""


def named_form(template: str) -> CallForm:
    """The form that the text of a chat template names, for one that writes no calls itself."""
    if "<|tool_call|>" in template:
        return LISTED
    return TAGGED if "<tool_call>" in template else BARE
