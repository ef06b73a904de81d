"""The messages of a conversation, as clients send them and send them back."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, model_validator

MOST_FIELDS = 128
"""Fields of one object; the interface has no object with so many."""
MOST_PARTS = 1024
MOST_CALLS = 128
Name = Annotated[str, Field(max_length=1024)]


class BoundedModel(BaseModel):
    """A model of few fields: it complains of a long object as a whole, and not of every field.

    Fields that it does not know are ignored: clients send back what other servers and libraries have added.
    """

    model_config = ConfigDict(strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _check_fields(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > MOST_FIELDS:
            raise ValueError(f"an object of at most {MOST_FIELDS} fields, got {len(value)}")
        return value


class Strict(BoundedModel):
    """A model that converts nothing and knows all its fields."""

    model_config = ConfigDict(extra="forbid")


class CalledFunction(BoundedModel):
    """The call of an earlier answer; `arguments` is a JSON object as text."""

    name: Name
    arguments: str
    parsed_arguments: Any = None
    """The value that a client has read from `arguments`; it is not looked at."""


class CustomInput(BoundedModel):
    """The call of a tool that takes free text."""

    name: Name
    input: str


class ToolCall(BoundedModel):
    """A call that an earlier answer made: of a function, or of a tool that takes free text."""

    id: Name | None = None
    type: Literal["function", "custom"] | None = None
    function: CalledFunction | None = None
    custom: CustomInput | None = None
    index: int | None = None
    """Place of the call in a streamed answer."""


class SpokenAnswer(BoundedModel):
    """The sound of an earlier answer, of which the text alone is read."""

    transcript: str


def _read_content(value: Any) -> str | list[dict[str, Any]] | None:
    """Text, or a list of parts. Raises ValueError for anything else."""
    if isinstance(value, list) and len(value) <= MOST_PARTS and all(isinstance(part, dict) for part in value):
        return value
    if value is None or isinstance(value, str):
        return value
    raise ValueError(f"expected text, or a list of up to {MOST_PARTS} parts")


class Message(BoundedModel):
    """One message of a conversation.

    The fields after `tool_call_id` are those that answers have, of this server or another, and that clients send back.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    # pydantic would try both types for every part, and complain of every one.
    content: Annotated[str | list[dict[str, Any]] | None, PlainValidator(_read_content)] = None
    name: Name | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True, max_length=MOST_CALLS)] | None = None
    tool_call_id: Name | None = None
    refusal: str | None = None
    audio: SpokenAnswer | None = None
    function_call: CalledFunction | None = None
    """A call in the older form, which `tool_calls` replaced."""
    reasoning_content: str | None = None
    reasoning: str | None = None
    """The newer name of `reasoning_content` in vLLM."""
    annotations: list[Any] | None = None
    parsed: Any = None
    """This and `annotations` repeat what the content says, and are ignored."""

    @property
    def said(self) -> str | list[dict[str, Any]] | None:
        """The content of the message, or what an answer has in place of one; None if it has neither."""
        if self.content is not None or self.refusal is not None:
            return self.content if self.content is not None else self.refusal
        return None if self.audio is None else self.audio.transcript
