"""The shapes of answers: of chats and of completions, whole or in chunks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from ssd_runtime.engine.output.result import Outcome
from ssd_runtime.serving.http.openai.logprobs import Json, Position, chat_logprobs, completion_logprobs
from ssd_runtime.serving.http.openai.tool_calls import ParsedCall, ToolCallReader

FINISH_REASONS = {"stop": "stop", "length": "length", "context": "length"}
"""OpenAI's finish reason, which is vLLM's `finished_reason` too, by ours."""


class Form(Protocol):
    """The choices of one endpoint's answers."""

    prefix: str
    """Beginning of an answer's id."""
    whole: str
    """`object` of a whole answer."""
    chunk: str
    """`object` of a chunk."""

    def logprobs(self, positions: Sequence[Position]) -> Json:
        """The `logprobs` of a choice."""
        ...

    def first(self, place: int) -> Json | None:
        """The choice of a first chunk without text; None if there is none."""
        ...

    def block(self, place: int, text: str) -> list[Json]:
        """The choices of the chunks for new text."""
        ...

    def skip(self, place: int, text: str) -> None:
        """Go on after text that the client has."""
        ...

    def last(self, place: int, outcome: Outcome) -> list[Json]:
        """The choices of the last chunks."""
        ...

    def choice(self, place: int, outcome: Outcome) -> Json:
        """The choice of a whole answer."""
        ...


class CompletionForm:
    """Choices of `/v1/completions`."""

    prefix = "cmpl-"
    whole = "text_completion"
    chunk = "text_completion"

    def logprobs(self, positions: Sequence[Position]) -> Json:
        """Lists of tokens, log-probabilities and offsets."""
        return completion_logprobs(positions)

    def first(self, place: int) -> Json | None:
        """None: text comes first."""
        return None

    def block(self, place: int, text: str) -> list[Json]:
        """One choice with the text."""
        return [_completion(place, text, None)]

    def skip(self, place: int, text: str) -> None:
        """Do nothing: a completion's choices do not depend on earlier text."""

    def last(self, place: int, outcome: Outcome) -> list[Json]:
        """One choice without text."""
        return [_completion(place, "", FINISH_REASONS[outcome.generation.finish_reason])]

    def choice(self, place: int, outcome: Outcome) -> Json:
        """The whole text."""
        return _completion(place, outcome.text, FINISH_REASONS[outcome.generation.finish_reason])


class ChatForm:
    """Choices of `/v1/chat/completions`, with tool calls if tools were offered."""

    prefix = "chatcmpl-"
    whole = "chat.completion"
    chunk = "chat.completion.chunk"

    def __init__(
        self, with_tools: bool = False, most_calls: int | None = None, bare_tools: Collection[str] = ()
    ) -> None:
        """Calls after the first `most_calls` of an answer are dropped.

        Calls of `bare_tools` are read without tags, too (`ToolCallReader`).
        """
        self._with_tools = with_tools
        self._most_calls = most_calls
        self._bare_tools = bare_tools
        self._readers: dict[int, ToolCallReader] = {}
        """Readers of streamed choices by place."""

    def logprobs(self, positions: Sequence[Position]) -> Json:
        """An entry per token."""
        return chat_logprobs(positions)

    def first(self, place: int) -> Json | None:
        """The role."""
        return _delta(place, {"role": "assistant", "content": ""})

    def block(self, place: int, text: str) -> list[Json]:
        """The text, or the calls that are complete with it."""
        if not self._with_tools:
            return [_delta(place, {"content": text})]
        reader = self._reader(place)
        before = reader.calls
        return self._deltas(place, reader.feed(text), before)

    def skip(self, place: int, text: str) -> None:
        """Read the calls in text that the client has."""
        if self._with_tools:
            self._reader(place).feed(text)

    def last(self, place: int, outcome: Outcome) -> list[Json]:
        """The text that was held back, then the reason of the end."""
        reader = self._reader(place)
        before = reader.calls
        held = self._deltas(place, reader.close(), before)
        reason = "tool_calls" if reader.calls else FINISH_REASONS[outcome.generation.finish_reason]
        return [*held, _delta(place, {}, reason)]

    def choice(self, place: int, outcome: Outcome) -> Json:
        """The whole message."""
        reader = self._new_reader()
        parts = [*reader.feed(outcome.text), *reader.close()] if self._with_tools else [outcome.text]
        calls = [_call(part) for part in parts if isinstance(part, ParsedCall)]
        text = "".join(part for part in parts if isinstance(part, str))
        message: Json = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
        if calls:
            message["tool_calls"] = calls
        reason = "tool_calls" if calls else FINISH_REASONS[outcome.generation.finish_reason]
        return {"index": place, "message": message, "logprobs": None, "finish_reason": reason}

    def _reader(self, place: int) -> ToolCallReader:
        if place not in self._readers:
            self._readers[place] = self._new_reader()
        return self._readers[place]

    def _new_reader(self) -> ToolCallReader:
        return ToolCallReader(self._most_calls, self._bare_tools)

    def _deltas(self, place: int, parts: list[str | ParsedCall], before: int) -> list[Json]:
        """Choices of parts, after `before` calls of the same answer."""
        deltas = list[Json]()
        for part in parts:
            if isinstance(part, ParsedCall):
                deltas.append(_delta(place, {"tool_calls": [{"index": before, **_call(part)}]}))
                before += 1
            else:
                deltas.append(_delta(place, {"content": part}))
        return deltas


def _completion(place: int, text: str, reason: str | None) -> Json:
    return {"index": place, "text": text, "logprobs": None, "finish_reason": reason}


def _delta(place: int, delta: Json, reason: str | None = None) -> Json:
    return {"index": place, "delta": delta, "logprobs": None, "finish_reason": reason}


def _call(call: ParsedCall) -> Json:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
