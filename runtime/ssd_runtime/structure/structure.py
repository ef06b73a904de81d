"""The shape that an answer must have, as a user gives it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ssd_profiles.errors import UserError

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MOST_CHARACTERS = 1 << 16
"""Most characters of a schema, an expression or a grammar: longer ones take seconds to compile."""
STYLE: JsonCompileOptions = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""The style of JSON is that of Python's `json.dumps`, on one line. So all that is between two values is determined. A
schema may choose otherwise with llguidance's `x-guidance`."""


class StructureError(UserError):
    """A structure that cannot be honoured."""


@dataclass(frozen=True, slots=True)
class Structure:
    """A shape that answers are held to. Raises StructureError for a text that is too long."""

    kind: Literal["json_schema", "regex", "grammar"]
    text: str
    """A JSON schema, a regular expression of the whole answer, or a grammar in Lark's or llama.cpp's notation."""

    def __post_init__(self) -> None:
        _require_short(self.text)

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str) -> Structure:
        """JSON that a schema allows. Raises StructureError for a schema that is no JSON object."""
        if isinstance(schema, str):
            _require_short(schema)
        try:
            value = json.loads(schema) if isinstance(schema, str) else schema
            text = json.dumps(whole_numbers(value))
        except (ValueError, TypeError, RecursionError) as error:
            raise StructureError(f"structure: the schema is not JSON ({error}); give a JSON schema") from None
        if not isinstance(value, Mapping):
            raise StructureError(f"structure: a schema is a JSON object, not {type(value).__name__}; give an object")
        return cls("json_schema", text)

    @classmethod
    def json_object(cls) -> Structure:
        """Any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def regex(cls, pattern: str) -> Structure:
        """Text that a regular expression matches as a whole."""
        return cls("regex", pattern)

    @classmethod
    def grammar(cls, text: str) -> Structure:
        """Text that a grammar derives, in Lark's or llama.cpp's notation."""
        return cls("grammar", text)

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Structure:
        """One of some texts. Raises StructureError for none, or an empty one."""
        if not texts or "" in texts:
            raise StructureError("structure: choices are texts that are not empty; give one or more")
        return cls("grammar", f"start: {' | '.join(quoted(text) for text in texts)}\n")


def _require_short(text: str) -> None:
    if len(text) > MOST_CHARACTERS:
        raise StructureError(f"structure: {len(text)} characters; give at most {MOST_CHARACTERS}")


def whole_numbers(schema: Any) -> Any:
    """A schema with numbers such as 2.0 as 2, which JSON Schema takes for the same and llguidance does not."""
    return json.loads(json.dumps(schema), parse_float=_number)


def _number(text: str) -> float:
    number = float(text)
    return int(number) if number.is_integer() and abs(number) < 1 << 53 else number


def quoted(text: str) -> str:
    """A text as a string of a grammar in Lark's notation."""
    return json.dumps(text, ensure_ascii=False)
