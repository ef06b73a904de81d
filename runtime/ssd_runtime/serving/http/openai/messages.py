"""The messages of a conversation, as clients send them and send them back."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Text = Annotated[str, Field(max_length=1 << 24)]


class Strict(BaseModel):
    """A model that converts nothing and knows all its fields."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class CalledFunction(Strict):
    """The call of an earlier answer; `arguments` is a JSON object as text."""

    name: str
    arguments: str
    parsed_arguments: Any = None
    """The value that a client has read from `arguments`; it is not looked at."""


class CustomInput(Strict):
    """The call of a tool that takes free text."""

    name: str
    input: str


class ToolCall(Strict):
    """A call that an earlier answer made: of a function, or of a tool that takes free text."""

    id: str | None = None
    type: Literal["function", "custom"] | None = None
    function: CalledFunction | None = None
    custom: CustomInput | None = None
    index: int | None = None
    """Place of the call in a streamed answer."""


class SpokenAnswer(BaseModel):
    """The sound of an earlier answer, of which the text alone is read."""

    model_config = ConfigDict(strict=True, frozen=True)
    transcript: Text


class Message(Strict):
    """One message of a conversation.

    The fields after `tool_call_id` are those that answers have, of this server or another, and that clients send back.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: Text | None = None
    audio: SpokenAnswer | None = None
    function_call: CalledFunction | None = None
    """The form of a call before there were `tool_calls`."""
    reasoning_content: Text | None = None
    reasoning: Text | None = None
    """The newer name of `reasoning_content` in vLLM."""
    annotations: list[Any] | None = None
    parsed: Any = None
    """The last two repeat what the content says, and are not looked at."""

    @property
    def said(self) -> str | list[dict[str, Any]] | None:
        """The content of the message, or what an answer has in place of one; None if it has neither."""
        if self.content is not None or self.refusal is not None:
            return self.content if self.content is not None else self.refusal
        return None if self.audio is None else self.audio.transcript
