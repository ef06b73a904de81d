"""The forms in which models write tool calls, and the grammars of answers that must have some."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ssd_runtime.structure.structure import STYLE, Structure, quoted

EMPTY: Mapping[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class CallForm:
    """A model's form of calls: JSON objects with `name` and `arguments`, each within tags or in one list."""

    opening: str = ""
    closing: str = ""
    arguments: str = "arguments"
    is_list: bool = False
    """Whether all calls stand in one list."""

    def grammar(self, tools: Sequence[tuple[str, Mapping[str, Any] | None]], parallel: bool) -> str:
        """Rules of a grammar in Lark's notation, the first of which is `calls`; `tools` are names and parameters.

        With `parallel` there may be several calls, if the form has any way to write several.
        """
        rules = list[str]()
        for number, (name, parameters) in enumerate(tools):
            # Texts are read piece by piece, the longest first: longer pieces would hide those of other JSON.
            pieces = ("{", '"name"', ": ", json.dumps(name), ", ", f'"{self.arguments}"', ": ")
            rules.append(f"call{number}: {' '.join(map(quoted, pieces))} arguments{number} {quoted('}')}")
            rules.append(f"arguments{number}: %json {_styled({**EMPTY, **(parameters or {})})}")
        call = " | ".join(f"call{number}" for number in range(len(tools)))
        if self.is_list:
            more = f" ({quoted(', ')} call)*" if parallel else ""
            body = f"calls: {quoted(self.opening + '[')} call{more} {quoted(']' + self.closing)}"
        elif self.opening:
            one = f"{quoted(self.opening)} call {quoted(self.closing)}"
            rules.append(f"tagged: {one}")
            body = f"calls: tagged ({quoted(chr(10))} tagged)*" if parallel else "calls: tagged"
        else:
            body = "calls: call"
        return "\n".join([body, f"call: {call}", *rules]) + "\n"


TAGGED = CallForm("<tool_call>\n", "\n</tool_call>")
"""The form of Hermes, Qwen and SmolLM3."""
BARE = CallForm(arguments="parameters")
"""The form of Llama 3."""
LISTED = CallForm(is_list=True)
"""The form of Mistral and others, whose marks before the list are special tokens."""


def form_of(template: str) -> CallForm:
    """The form of calls that a chat template asks for."""
    if "<tool_call>" in template:
        return TAGGED
    if any(mark in template for mark in ("[TOOL_CALLS]", "<|tool_call|>", "functools[")):
        return LISTED
    return BARE


def calls_only(form: CallForm, tools: Sequence[tuple[str, Mapping[str, Any] | None]], parallel: bool) -> Structure:
    """Answers that are calls. Raises StructureError if the tools take too many characters."""
    return Structure("grammar", "start: calls\n" + form.grammar(tools, parallel))


def calls_or_json(
    form: CallForm, tools: Sequence[tuple[str, Mapping[str, Any] | None]], parallel: bool, schema: Mapping[str, Any]
) -> Structure:
    """Answers that are calls, or JSON that a schema allows. Raises StructureError as `calls_only` does."""
    rules = form.grammar(tools, parallel)
    return Structure("grammar", f"start: calls | answer\nanswer: %json {_styled(schema)}\n{rules}")


def _styled(schema: Mapping[str, Any]) -> str:
    return json.dumps({"x-guidance": STYLE, **schema})
