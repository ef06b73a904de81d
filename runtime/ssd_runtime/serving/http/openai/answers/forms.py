"""The shapes of answers: of chats and of completions, whole or in chunks."""

from __future__ import annotations

from dataclasses import dataclass, field

from ssd_runtime.engine.output.channels import ChannelReader
from ssd_runtime.engine.output.result import Outcome
from ssd_runtime.serving.http.openai.answers.events import Json
from ssd_runtime.serving.http.openai.answers.logprobs import chat_logprobs, completion_logprobs
from ssd_runtime.serving.http.openai.calls.call_forms import TAGGED, CallForm, ElementCall, ToolSchemas
from ssd_runtime.serving.http.openai.calls.element_reader import ElementReader
from ssd_runtime.serving.http.openai.calls.json_reader import JsonReader
from ssd_runtime.serving.http.openai.calls.tool_calls import CallReader, ParsedCall, Part, joined
from ssd_runtime.serving.http.openai.reasoning import ReasoningReader
from ssd_runtime.serving.http.pending import FINISH_REASONS


class CompletionForm:
    """Choices of `/v1/completions`."""

    prefix = "cmpl-"
    whole = "text_completion"
    chunk = "text_completion"
    logprobs = staticmethod(completion_logprobs)

    def first(self, place: int) -> Json | None:
        """None: text comes first."""
        return None

    def block(self, place: int, text: str) -> list[Json]:
        """One choice with the text."""
        return [_completion(place, text, None)]

    def last(self, place: int, outcome: Outcome) -> list[Json]:
        """One choice without text."""
        return [_completion(place, "", FINISH_REASONS[outcome.generation.finish_reason])]

    def choice(self, place: int, outcome: Outcome) -> Json:
        """The whole text."""
        return _completion(place, outcome.text, FINISH_REASONS[outcome.generation.finish_reason])


@dataclass(slots=True, eq=False)
class ChatForm:
    """Choices of `/v1/chat/completions`, with tool calls if tools were offered, and apart from them thoughts."""

    prefix = "chatcmpl-"
    whole = "chat.completion"
    chunk = "chat.completion.chunk"
    logprobs = staticmethod(chat_logprobs)

    tools: ToolSchemas = ()
    """The offered tools."""
    call_form: CallForm = TAGGED
    """The form of calls, as answers show it."""
    most_calls: int | None = None
    """Calls after the first `most_calls` of an answer are dropped."""
    thinks: bool | None = None
    """Whether the prompt has opened the model's thoughts; None for a model that has none."""
    has_channels: bool = False
    """Whether the text is in channels."""
    _readers: dict[int, _ChatReader] = field(default_factory=dict)
    """Readers of choices by place."""

    def first(self, place: int) -> Json | None:
        """The role."""
        return _delta(place, {"role": "assistant", "content": ""})

    def block(self, place: int, text: str) -> list[Json]:
        """The text, the thoughts, or the parts of calls."""
        return self._reader(place).deltas(text)

    def last(self, place: int, outcome: Outcome) -> list[Json]:
        """The text that was held back, then the reason of the end."""
        reader = self._reader(place)
        held = reader.deltas(None)
        return [*held, _delta(place, {}, reader.reason(outcome))]

    def choice(self, place: int, outcome: Outcome) -> Json:
        """The whole message."""
        reader = self._reader(place)
        (thoughts, parts), (last_thoughts, last_parts) = reader.read(outcome.text), reader.read(None)
        text, calls = joined([*parts, *last_parts])
        message: Json = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
        if thoughts := thoughts + last_thoughts:
            message["reasoning_content"] = thoughts
        if calls:
            message["tool_calls"] = [_call(call) for call in calls]
        return {"index": place, "message": message, "logprobs": None, "finish_reason": reader.reason(outcome)}

    def _reader(self, place: int) -> _ChatReader:
        if place not in self._readers:
            thoughts = None if self.thinks is None else ReasoningReader(self.thinks)
            self._readers[place] = _ChatReader(
                place=place,
                thoughts=ChannelReader() if self.has_channels else thoughts,
                calls=reader_of(self.call_form, self.tools, self.most_calls) if self.tools else None,
            )
        return self._readers[place]


Form = ChatForm | CompletionForm


@dataclass(slots=True, kw_only=True)
class _ChatReader:
    """Reads one choice's text."""

    place: int
    thoughts: ReasoningReader | ChannelReader | None
    calls: CallReader | None
    _told: int = 0
    """Number of calls that were told."""

    def read(self, text: str | None) -> tuple[str, list[Part]]:
        """The thoughts and the other parts that are certain with more text, or at the end with None."""
        thoughts = ""
        if self.thoughts is not None:
            thoughts, rest = self.thoughts.close() if text is None else self.thoughts.feed(text)
        else:
            rest = text or ""
        if self.calls is None:
            return thoughts, [rest] if rest else []
        parts = self.calls.feed(rest)
        return thoughts, [*parts, *self.calls.close()] if text is None else parts

    def deltas(self, text: str | None) -> list[Json]:
        """The choices of chunks for more text, or for the end with None."""
        thoughts, parts = self.read(text)
        found = [_delta(self.place, {"reasoning_content": thoughts})] if thoughts else []
        for part in parts:
            if isinstance(part, str):
                found.append(_delta(self.place, {"content": part}))
                continue
            if isinstance(part, ParsedCall):
                call = _call(part)
                self._told += 1
            else:
                call = {"function": {"arguments": part.arguments}}
            found.append(_delta(self.place, {"tool_calls": [{"index": self._told - 1, **call}]}))
        return found

    def reason(self, outcome: Outcome) -> str:
        """OpenAI's finish reason, once all text was read."""
        reason = FINISH_REASONS[outcome.generation.finish_reason]
        return "tool_calls" if reason == "stop" and self.calls is not None and self.calls.calls else reason


def reader_of(form: CallForm, tools: ToolSchemas, most: int | None = None) -> CallReader:
    """The reader of one answer's calls of `tools` in a form as answers show it; calls after `most` are dropped."""
    if isinstance(form.call, ElementCall) and form.opening.strip():
        return ElementReader(form, form.call, dict(tools), most)
    return JsonReader(form, [name for name, _ in tools], most)


def _completion(place: int, text: str, reason: str | None) -> Json:
    return {"index": place, "text": text, "logprobs": None, "finish_reason": reason}


def _delta(place: int, delta: Json, reason: str | None = None) -> Json:
    return {"index": place, "delta": delta, "logprobs": None, "finish_reason": reason}


def _call(call: ParsedCall) -> Json:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
