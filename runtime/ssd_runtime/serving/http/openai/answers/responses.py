"""OpenAI's `/v1/responses` without what a server would have to remember: its bodies and answers are those of a chat."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any
from uuid import uuid4

from ssd_runtime.serving.http.openai.answers.events import Json, event_of
from ssd_runtime.serving.http.openai.errors import invalid
from ssd_runtime.serving.http.openai.requests.fields import EFFORT, IGNORED_SAFELY, UNSUPPORTED

SAME = (
    *("model", "stream", "temperature", "top_p", "top_k", "min_p", "seed", "parallel_tool_calls", "ssd"),
    *("structured_outputs", "repetition_penalty", "chat_template_kwargs"),
    *UNSUPPORTED,
)
"""Fields that a chat's body has by the same name; those that no answer can honour are refused as a chat's."""
READ = ("input", "instructions", "max_output_tokens", "reasoning", "tools", "tool_choice", "text")
"""Fields that a chat's body has in another form."""
IGNORED = ("truncation", "stream_options", "include", "top_logprobs", *IGNORED_SAFELY)
"""Fields that change nothing here, unless they ask for log-probabilities."""
STATEFUL = ("previous_response_id", "conversation", "background", "prompt", "max_tool_calls", "context_management")
THOUGHT = {"role", "reasoning_content"}
"""Fields of a message of thoughts, before the text or the calls that follow are added to it."""
LOGPROBS = "message.output_text.logprobs"


def chat_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body of the chat that a response's body asks for. Raises ApiError for what only a server with a memory has.

    What is wrong in other ways is passed on, for the checks of a chat's body.
    """
    _check_fields(body)
    chat = {name: body[name] for name in SAME if body.get(name) is not None}
    reasoning = body.get("reasoning")
    if isinstance(reasoning, dict) and isinstance(reasoning.get("effort"), str):
        variables = chat.get("chat_template_kwargs", {})
        if isinstance(variables, dict):  # else the chat's checks refuse it
            chat["chat_template_kwargs"] = {EFFORT: reasoning["effort"], **variables}
    told = body.get("instructions")
    messages: list[dict[str, Any]] = [] if told is None else [{"role": "system", "content": told}]
    given = body.get("input")
    items = given if isinstance(given, list) else [{"role": "user", "content": given}]
    for item in items:
        _add(messages, item)
    chat["messages"] = messages
    if body.get("max_output_tokens") is not None:
        chat["max_completion_tokens"] = body["max_output_tokens"]
    if tools := body.get("tools"):
        chat["tools"] = [_nested(tool) for tool in tools] if isinstance(tools, list) else tools
    choice = body.get("tool_choice")
    if choice is not None:
        chat["tool_choice"] = _nested(choice) if isinstance(choice, dict) else choice
    text = body.get("text")
    form = text.get("format") if isinstance(text, dict) else text
    if isinstance(text, dict) and "verbosity" in text:
        chat["verbosity"] = text["verbosity"]
    if form is not None:
        named = isinstance(form, dict) and form.get("type") == "json_schema"
        chat["response_format"] = _nested(form, "json_schema") if named else form
    if chat.get("stream"):
        chat["stream_options"] = {"include_usage": True}
    return chat


def _check_fields(body: Mapping[str, Any]) -> None:
    """Raise ApiError for fields that are unknown, or need a memory or log-probabilities."""
    known = {*SAME, *IGNORED, *STATEFUL, *READ}
    for name, value in body.items():
        if name in STATEFUL and value not in (None, False):
            raise invalid(
                name, "answers and prompts are not kept here; omit it, and send the whole conversation as `input`"
            )
        if name not in known and value is not None:
            raise invalid(name, "this field is unknown here; omit it", "unknown_parameter")
    include = body.get("include")
    asking = {"include": isinstance(include, list) and LOGPROBS in include, "top_logprobs": body.get("top_logprobs")}
    for name, asks in asking.items():
        if asks:
            raise invalid(name, "log-probabilities are told by /v1/chat/completions alone; omit it, or ask there")


def _nested(value: Any, name: str = "function") -> Any:
    """An object whose fields stand, but for its type, in an object of their own."""
    if not isinstance(value, dict) or value.get("type") != name:
        return value
    return {"type": name, name: {key: each for key, each in value.items() if key != "type"}}


def _add(messages: list[dict[str, Any]], item: Any) -> None:
    """Add an item of the conversation. Raises ApiError for one that is no object, or of another kind."""
    kind = item.get("type", "message") if isinstance(item, dict) else None
    if kind == "message":
        content = item.get("content")
        if isinstance(content, list):
            content = [_part(part) for part in content]
        if item.get("role") == "assistant" and messages and messages[-1].keys() == THOUGHT:
            messages[-1]["content"] = content
        else:
            messages.append({"role": item.get("role"), "content": content})
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant"})
        messages[-1].setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        output = item.get("output")
        content = [_part(part) for part in output] if isinstance(output, list) else output
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
    elif kind == "reasoning":
        # Models expect their thoughts back within a series of calls.
        parts = item.get("content")
        if isinstance(parts, list) and all(isinstance(part, dict) for part in parts) and parts:
            thoughts = "".join(str(part.get("text", "")) for part in parts)
            messages.append({"role": "assistant", "reasoning_content": thoughts})
    else:
        raise invalid("input", "an item is a message, a function's call or its output; send one of these")


def _part(part: Any) -> Any:
    if isinstance(part, dict) and part.get("type") in ("input_text", "output_text"):
        return {"type": "text", "text": part.get("text")}
    return part


class ResponseWriter:
    """Writes a chat's answer, whole or by its chunks, as a response with its events."""

    def __init__(self, chat: Mapping[str, Any], body: Mapping[str, Any]) -> None:
        """`chat` has the id, the time and the model of the chat's answer; `body` is the response's request."""
        self._number = 0
        self._items: list[Json] = []
        self._open = False
        self.response: Json = {
            "id": str(chat["id"]).replace("chatcmpl-", "resp_"),
            "object": "response",
            "created_at": chat["created"],
            "model": chat["model"],
            "status": "in_progress",
            "output": [],
            "error": None,
            "incomplete_details": None,
            "instructions": body.get("instructions"),
            "metadata": body.get("metadata") or {},
            "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
            "temperature": body.get("temperature"),
            "top_p": body.get("top_p"),
            "max_output_tokens": body.get("max_output_tokens"),
            "tool_choice": body.get("tool_choice") or "auto",
            "tools": body.get("tools") or [],
            "text": body.get("text") or {"format": {"type": "text"}},
        }

    def begin(self) -> Iterator[str]:
        """The first events."""
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self.response)

    def delta(self, delta: Mapping[str, Any]) -> Iterator[str]:
        """The events of a chunk's delta, or of a whole message."""
        if thoughts := delta.get("reasoning_content"):
            yield from self._text("reasoning", thoughts)
        if text := delta.get("content"):
            yield from self._text("message", text)
        for call in delta.get("tool_calls") or ():
            if "id" in call:
                named = {"call_id": call["id"], "name": call["function"]["name"], "arguments": ""}
                yield from self._begin({"id": f"fc_{uuid4().hex}", "type": "function_call", **named})
            if piece := call["function"]["arguments"]:
                self._items[-1]["arguments"] += piece
                yield self._at("response.function_call_arguments.delta", delta=piece)

    def end(self, reason: str, usage: Mapping[str, Any]) -> Iterator[str]:
        """The last events, after a chat's finish reason and usage."""
        cut = reason == "length"
        status = "incomplete" if cut else "completed"
        yield from self._close(status)
        self.response |= {
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": self._items,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
                "ssd": usage["ssd"],
            },
        }
        yield self._event(f"response.{status}", response=self.response)

    def fail(self, error: Mapping[str, Any]) -> str:
        """The event of an error."""
        told = {name: error.get(name) for name in ("code", "message", "param")}
        return self._event("error", **told)

    def _text(self, kind: str, text: str) -> Iterator[str]:
        """The events of more text of an answer or of thoughts."""
        part = "output_text" if kind == "message" else "reasoning_text"
        if not self._open or self._items[-1]["type"] != kind:
            own: Json = {"role": "assistant"} if kind == "message" else {"summary": []}
            item: Json = {"id": f"{kind[:3]}_{uuid4().hex}", "type": kind, "content": [], **own}
            yield from self._begin(item)
            content: Json = {"type": part, "text": ""}
            if kind == "message":
                content["annotations"] = []
            item["content"].append(content)
            yield self._at("response.content_part.added", content_index=0, part=content)
        self._items[-1]["content"][0]["text"] += text
        more: Json = {"logprobs": []} if kind == "message" else {}
        yield self._at(f"response.{part}.delta", content_index=0, delta=text, **more)

    def _begin(self, item: Json) -> Iterator[str]:
        yield from self._close("completed")
        item["status"] = "in_progress"
        self._items.append(item)
        self._open = True
        yield self._at("response.output_item.added", item=item)

    def _close(self, status: str) -> Iterator[str]:
        """The events that end the open item."""
        if not self._open:
            return
        item = self._items[-1]
        if item["type"] == "function_call":
            yield self._at("response.function_call_arguments.done", arguments=item["arguments"], name=item["name"])
        else:
            [part] = item["content"]
            more: Json = {"logprobs": []} if item["type"] == "message" else {}
            yield self._at(f"response.{part['type']}.done", content_index=0, text=part["text"], **more)
            yield self._at("response.content_part.done", content_index=0, part=part)
        item["status"] = status
        self._open = False
        yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _at(self, kind: str, **fields: Any) -> str:
        """An event of the latest item."""
        own = {} if "item" in fields else {"item_id": self._items[-1]["id"]}
        return self._event(kind, output_index=len(self._items) - 1, **own, **fields)

    def _event(self, kind: str, **fields: Any) -> str:
        value = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return event_of(value, kind)


def whole_response(chat: Json, body: Mapping[str, Any]) -> Json:
    """The response that a chat's whole answer is."""
    writer = ResponseWriter(chat, body)
    [choice] = chat["choices"]
    for _ in (*writer.delta(choice["message"]), *writer.end(choice["finish_reason"], chat["usage"])):
        pass
    return writer.response


def failed_event(error: Mapping[str, Any]) -> str:
    """The event of an error before any other event."""
    return ResponseWriter({"id": "", "created": 0, "model": ""}, {}).fail(error)


async def response_events(chunks: AsyncIterator[list[Json]], body: Mapping[str, Any]) -> AsyncIterator[str]:
    """The events of the response that a chat's chunks, with a last one of usage, are."""
    writer: ResponseWriter | None = None
    reason = "stop"
    async for together in chunks:
        for chunk in together:
            if "error" in chunk:
                yield failed_event(chunk["error"]) if writer is None else writer.fail(chunk["error"])
                return
            if writer is None:
                writer = ResponseWriter(chunk, body)
                yield "".join(writer.begin())
            for choice in chunk["choices"]:
                for each in writer.delta(choice["delta"]):
                    yield each
                reason = choice["finish_reason"] or reason
            if chunk.get("usage"):
                yield "".join(writer.end(reason, chunk["usage"]))
