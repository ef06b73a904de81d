"""Turns the messages of a chat request into token ids, through the model's chat template."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from inspect import signature
from threading import Event, Lock
from typing import Any

from ssd_profiles.errors import UserError
from ssd_profiles.printable import printable
from ssd_runtime.loading.loaded_model import LoadedModel
from ssd_runtime.loading.prompt_tokens import TooLongError
from ssd_runtime.serving.http.engine_thread import Closing
from ssd_runtime.serving.http.openai.calls import probe
from ssd_runtime.serving.http.openai.calls.call_forms import CallForm, named_form
from ssd_runtime.serving.http.openai.errors import ApiError, invalid, too_long
from ssd_runtime.serving.http.openai.reasoning import CLOSE, OPEN
from ssd_runtime.serving.http.openai.requests.fields import EFFORT
from ssd_runtime.serving.http.openai.requests.json_bounds import TooMuch, read_json, require_few
from ssd_runtime.serving.http.openai.requests.messages import Message, ToolCall
from ssd_runtime.serving.http.openai.requests.tools import Tool
from ssd_runtime.serving.http.token_bytes import TokenBytes
from ssd_runtime.templates.renderer import RenderingStopped, TemplateLate, TemplateRefused

MOST_NESTING = 64
"""Most lists and objects within each other, in a call's arguments, a tool's parameters or a template's variables."""
LAST = 16
"""Tokens at the end of a prompt that are looked at for the beginning of thoughts."""
OF_ANSWERS = (
    *("tool_calls", "function_call", "refusal", "audio", "reasoning_content", "reasoning", "annotations", "parsed"),
)
"""Fields that only an assistant's message has."""
CACHE_MARKS = ("cache_control", "prompt_cache_breakpoint")
"""Marks, in parts of messages, of the end of a prefix to keep, for other servers; prefixes are kept here anyway."""


class PromptEncoder:
    """Encodes prompts for one model; several threads may use it."""

    def __init__(self, loaded: LoadedModel, template: str | None = None, longest: int | None = None) -> None:
        """`template` replaces the tokenizer's chat template, which itself is part of a bundle's fingerprint.

        Prompts of far more than `longest` tokens are refused before they are encoded.
        """
        self.loaded = loaded
        self._longest = longest
        self.token_bytes = TokenBytes(loaded.tokenizer, loaded.hidden.values())
        self._lock = Lock()
        self._template = template
        self._arguments = {"messages", *signature(loaded.tokenizer.apply_chat_template).parameters}
        """Names that are no free variables of a template."""
        templates = template or loaded.tokenizer.chat_template or ""
        self._template_text = templates if isinstance(templates, str) else "\n".join(templates.values())
        self.takes_tools = re.search(r"\btools\b", self._template_text) is not None
        """Whether the chat template shows tools to the model."""
        self.takes_effort = EFFORT in self._template_text
        """Whether the chat template tells the model how much to think."""

    @cached_property
    def call_form(self) -> CallForm:
        """The form of calls that the chat template writes, or else names."""
        if not self.takes_tools:
            return named_form(self._template_text)
        control = self.loaded.prompts.control
        return probe.form_of(self._probed, control, self.loaded.eos_ids) or named_form(self._template_text)

    @cached_property
    def shown_call_form(self) -> CallForm:
        """The same form as answers show it."""
        return self.call_form.visible(self.loaded.hidden)

    def _probed(self, calls: int) -> str:
        """A conversation with so many calls as the template writes it; empty if it refuses it.

        Raises ApiError if it takes too long, so that a later request asks again.
        """
        try:
            return self.loaded.prompts.render(probe.conversation(calls), self._template, [probe.TOOL]).text
        except TemplateLate as late:
            raise _overloaded(late) from None
        except TemplateRefused:
            return ""

    def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        variables: Mapping[str, Any] | None = None,
        stop: Event | None = None,
    ) -> list[int]:
        """Encode a conversation, with more variables for the template; it ends soon after `stop` is set.

        Raises ApiError if the template refuses it or takes no tools, or if a variable is not for the client to set. A
        conversation of far more tokens than the longest prompt is refused, too.
        """
        if tools and not self.takes_tools:
            raise invalid(
                "tools",
                "this model's chat template takes no tools; omit them, or start the server with a --chat-template",
                "unsupported_parameter",
            )
        for name in variables or ():
            if name in self._arguments:
                raise invalid("chat_template_kwargs", f"{name!r} is not for a request to set; omit it")
        _require_shallow(variables, "chat_template_kwargs")
        dumped = [_dumped(tool) for tool in tools]
        _require_shallow(dumped, "tools")
        _require_few_arguments(messages)
        turns = [_turn(message, place) for place, message in enumerate(messages)]
        prompts = self.loaded.prompts
        try:
            if not self._template_text:
                with self._lock:
                    return prompts.text("\n\n".join(turn["content"] for turn in turns), self._longest)
            # Templates may leave out what was thought in answers, so that these do not count yet.
            asked = [turn for turn in turns if turn["role"] != "assistant"]
            with self._lock:
                prompts.require_short([asked, dumped, dict(variables or {})], self._longest)
            # A template may take seconds, for which no other request waits.
            rendered = prompts.render(turns, self._template, dumped, variables, stop)
            with self._lock:
                return prompts.encode(rendered, self._longest)
        except TooLongError:
            raise self._too_long() from None
        except UserError as error:
            raise invalid("messages", str(error).removeprefix("prompt: ")) from None
        except TemplateLate as late:
            raise _overloaded(late) from None
        except TemplateRefused as error:
            raise invalid(
                "messages", f"the model's chat template refuses them ({printable(str(error))}); change them"
            ) from None
        except RenderingStopped:
            raise ApiError(503, str(Closing()), code="shutting_down", retry_after=1) from None

    def thinks(self, ids: Sequence[int]) -> bool | None:
        """Whether a prompt has opened the model's thoughts; None if the chat template knows none."""
        if CLOSE not in self._template_text:
            return None
        end = str(self.loaded.tokenizer.decode(ids[-LAST:], skip_special_tokens=False))
        return end.rstrip().endswith(OPEN)

    def check_template(self, where: str) -> None:
        """Raise UserError, which names the template `where`, if it cannot write a message of a user."""
        try:
            self.chat([Message(role="user", content="?")], [])
        except ApiError as error:
            raise UserError(f"--chat-template: {where} does not work: {error.message}") from None

    def text(self, prompt: str | list[int], vocabulary: int) -> list[int]:
        """Encode a text as it is, control tokens included; ids are checked against the size of the vocabulary."""
        if isinstance(prompt, str):
            try:
                with self._lock:
                    return self.loaded.prompts.raw(prompt, self._longest)
            except TooLongError:
                raise self._too_long() from None
        if max(prompt) >= vocabulary:
            raise invalid("prompt", f"token id {max(prompt)} is none of this model's; send ids up to {vocabulary - 1}")
        return prompt

    def _too_long(self) -> ApiError:
        most = self._longest or 0
        return too_long(f"more than {2 * most}", most)


def text_of(message: Message, place: int) -> str:
    """The text of a message, whose parts are joined by line feeds. Raises ApiError for parts that are no text."""
    said = message.said
    if said is None or isinstance(said, str):
        return said or ""
    texts = list[str]()
    for number, part in enumerate(said):
        where = f"messages.{place}.content.{number}"
        kind = part.get("type")
        if kind != "text" and not (kind == "refusal" and message.role == "assistant"):
            raise invalid(where, f"this model reads text alone, not {kind!r}; send text", "unsupported_content")
        unknown = sorted(set(part) - {"type", kind, *CACHE_MARKS})
        if unknown or not isinstance(part.get(kind), str):
            raise invalid(where, f"a {kind} part has `type` and `{kind}`{f', not {unknown[0]!r}' if unknown else ''}")
        texts.append(part[kind])
    return "\n".join(texts)


def _overloaded(late: TemplateLate) -> ApiError:
    """The error for a template that took too long, perhaps on a busy machine: a client may try again."""
    return ApiError(503, f"chat template: {late}", code="overloaded", retry_after=1)


def _dumped(tool: Tool) -> dict[str, Any]:
    """A tool as templates expect it, of which some read what clients may omit."""
    dumped = tool.model_dump(exclude_none=True)
    dumped["function"].setdefault("description", "")
    dumped["function"].setdefault("parameters", {"type": "object", "properties": {}})
    return dumped


def _turn(message: Message, place: int) -> dict[str, Any]:
    """A message as templates expect it."""
    where = f"messages.{place}"
    content = text_of(message, place)
    if message.role != "assistant":
        if message.content is None:
            raise invalid(f"{where}.content", "it is missing; give text")
        for name in OF_ANSWERS:
            if getattr(message, name):
                raise invalid(f"{where}.{name}", "only an assistant's message has it; omit it")
    turn: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role, "content": content}
    if message.name is not None:
        turn["name"] = message.name
    if message.tool_calls:
        turn["tool_calls"] = [_call(call, f"{where}.tool_calls") for call in message.tool_calls]
    elif message.function_call is not None:
        turn["tool_calls"] = [_call(ToolCall(function=message.function_call), f"{where}.function_call")]
    if reasoning := message.reasoning_content or message.reasoning:
        turn["reasoning_content"] = reasoning
        # GPT-OSS's name, which its template refuses beside the text before a call.
        turn["thinking"] = "" if content and "tool_calls" in turn else reasoning
    if (message.tool_call_id is not None) != (message.role == "tool"):
        told = (
            "it is missing; give the call's id" if message.role == "tool" else "only a tool's message has it; omit it"
        )
        raise invalid(f"{where}.tool_call_id", told)
    if message.tool_call_id is not None:
        turn["tool_call_id"] = message.tool_call_id
    return turn


def _call(call: ToolCall, where: str) -> dict[str, Any]:
    """An earlier call as templates expect it: they write the arguments as JSON themselves."""
    if (call.function is None) == (call.custom is None):
        raise invalid(where, "a call has either `function` or `custom`; send the call as it was answered")
    if call.custom is not None:
        # Templates know functions alone.
        function = {"name": call.custom.name, "arguments": {"input": call.custom.input}}
    else:
        assert call.function is not None, "one of the two is there"
        function = {"name": call.function.name, "arguments": _arguments(call.function.arguments, where)}
    return {"type": "function", "function": function, **({"id": call.id} if call.id is not None else {})}


def _require_few_arguments(messages: Sequence[Message]) -> None:
    """Raise ApiError if the arguments of all calls have more parts together than those of one call may have."""
    called = [call.function for message in messages for call in message.tool_calls or ()]
    called += [message.function_call for message in messages]
    try:
        require_few(function.arguments.encode() for function in called if function is not None)
    except TooMuch as error:
        raise invalid("messages", f"the arguments of calls: {error}") from None


def _arguments(text: str, where: str) -> dict[str, Any]:
    """The arguments of a call; a text that is no JSON object, such as a call that was cut, is an argument itself.

    Raises ApiError if they are too deep.
    """
    try:
        arguments = read_json(text.encode() or b"{}")
    except ValueError as error:
        if "recursion" in str(error):
            raise _too_deep(where) from None
        arguments = None
    if not isinstance(arguments, dict):
        return {"arguments": text}
    _require_shallow(arguments, where)
    return arguments


def _require_shallow(value: Any, where: str) -> None:
    """Raise ApiError if more than `MOST_NESTING` lists and objects are within each other."""
    level = [value]
    for _ in range(MOST_NESTING):
        inner = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)]
        level = [each for container in inner for each in container]
    if any(isinstance(each, dict | list) for each in level):
        raise _too_deep(where)


def _too_deep(where: str) -> ApiError:
    return invalid(where, f"lists and objects are nested more than {MOST_NESTING} deep; flatten them")
