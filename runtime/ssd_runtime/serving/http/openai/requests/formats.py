"""The forms of answers that requests ask for."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from ssd_runtime.serving.http.openai.errors import invalid
from ssd_runtime.serving.http.openai.requests.messages import MOST_PARTS, Name, Strict
from ssd_runtime.structure.structure import Structure, StructureError


class JsonSchema(Strict):
    """A schema with its name; it is always followed to the letter."""

    name: Name | None = None
    description: str | None = None
    fields: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(Strict):
    """The form of the answer, as OpenAI's."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Strict):
    """vLLM's extension: the form of the answer, which is one of these."""

    json_text: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[list[str], Field(fail_fast=True, max_length=MOST_PARTS)] | None = None
    grammar: str | None = None

    def structure(self) -> Structure:
        """The structure. Raises StructureError unless there is exactly one."""
        given = [name for name in type(self).model_fields if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise StructureError("structure: give one of `json`, `json_object`, `regex`, `choice` and `grammar`")
        if self.json_text is not None:
            return Structure.json_schema(self.json_text)
        if self.regex is not None:
            return Structure("regex", self.regex)
        if self.choice is not None:
            return Structure.choice(self.choice)
        return Structure.json_object() if self.grammar is None else Structure("grammar", self.grammar)


def structure_of(response: ResponseFormat | None, outputs: StructuredOutputs | None) -> Structure | None:
    """The form of an answer; None for free text. Raises ApiError for one that cannot be read, and for two."""
    kind = None if response is None else response.type
    if outputs is not None and kind not in (None, "text"):
        raise invalid("structured_outputs", "it differs from `response_format`; give one of the two")
    try:
        if outputs is not None:
            return outputs.structure()
        if response is None or kind == "text":
            return None
        if kind == "json_object":
            return Structure.json_object()
        if response.json_schema is None or response.json_schema.fields is None:
            raise StructureError("structure: `json_schema.schema` is missing; give it")
        return Structure.json_schema(response.json_schema.fields)
    except StructureError as error:
        field = "response_format" if outputs is None else "structured_outputs"
        raise invalid(field, str(error).removeprefix("structure: ")) from None
