"""The bodies of requests, checked field by field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, Field, PlainValidator, ValidationError

from ssd_runtime.serving.http.openai.errors import ApiError, invalid
from ssd_runtime.serving.http.openai.requests.fields import without_effect_removed
from ssd_runtime.serving.http.openai.requests.formats import ResponseFormat, StructuredOutputs, structure_of
from ssd_runtime.serving.http.openai.requests.json_bounds import TooMuch, read_json
from ssd_runtime.serving.http.openai.requests.messages import BoundedModel, Message, Name, Strict
from ssd_runtime.serving.http.openai.requests.tools import NamedTool, Tool
from ssd_runtime.serving.http.settings import MOST_ANSWERS
from ssd_runtime.structure.structure import Structure

MOST_STOPS = 32
MOST_STOP = 256
"""Characters of a stop text."""
MOST_CHOICES = 16
MOST_MESSAGES = 4096
MOST_TOOLS = 128
MOST_BIASES = 1024
MOST_PARAMETERS = 16
EXPECTED = {
    "tool_choice": "`auto`, `none`, `required` or a function's name",
    "parameters": "text or a number",
}
"""The values of fields that have several types."""


def _at_most(most: int) -> BeforeValidator:
    """Complains of too many entries of an object as a whole, before each of them is looked at."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > most:
            raise ValueError(f"at most {most} entries, got {len(value)}")
        return value

    return BeforeValidator(check)


def _read_stop(value: Any) -> str | list[str] | None:
    """Text, or a few texts. Raises ValueError for anything else."""
    if value is None:
        return None
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > MOST_STOPS or not all(isinstance(stop, str) for stop in stops):
        raise ValueError(f"expected text, or a list of up to {MOST_STOPS} texts")
    if any(len(stop) > MOST_STOP for stop in stops):
        raise ValueError(f"a stop text has at most {MOST_STOP} characters; shorten it")
    if "" in stops:
        raise ValueError("an empty string would end every answer at once; omit it")
    return stops


def _read_prompts(value: Any) -> list[str | list[int]]:
    """The prompts, as texts or token ids. Raises ValueError for anything else, and empty lists."""
    # The first item says what the others have to be. pydantic would try every type for each, and complain of each.
    prompts = (
        [value] if isinstance(value, str) or (isinstance(value, list) and _is_id(next(iter(value), None))) else value
    )
    if not isinstance(prompts, list) or not prompts or len(prompts) > MOST_ANSWERS:
        raise ValueError(EXPECTED_PROMPT)
    for prompt in prompts:
        is_read = isinstance(prompt, str) or (isinstance(prompt, list) and prompt and all(map(_is_id, prompt)))
        if not is_read or type(prompt) is not type(prompts[0]):
            raise ValueError(EXPECTED_PROMPT)
    return prompts


def _is_id(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 31


EXPECTED_PROMPT = (
    f"expected text, a list of up to {MOST_ANSWERS} texts, token ids, or a list of these; none of them empty"
)
Seed = Annotated[int, Field(ge=-(1 << 63), le=(1 << 63) - 1)]
Count = Annotated[int, Field(ge=1, le=1 << 31)]


class StreamOptions(BoundedModel):
    """Options of a streamed answer."""

    include_usage: bool | None = None
    """The stream ends with a chunk of usage."""
    include_drafts: bool | None = None
    """Our extension: chunks have `ssd`, which tells how each token was drafted."""
    include_obfuscation: bool | None = None
    """Padding against listeners who count bytes: OpenAI's own clients ask for it to be off. None is added here."""


class SsdOptions(Strict):
    """Our extension: how to decode. The answer does not depend on it."""

    strategy: Name | None = None
    parameters: Annotated[dict[Name, Name | int | float], _at_most(MOST_PARAMETERS)] = Field(default_factory=dict)


class CommonRequest(Strict):
    """Fields of both endpoints."""

    model: Name | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=1 << 31)] | None = None
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100.0)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] | None = None
    logit_bias: Annotated[dict[Name, Annotated[float, Field(ge=-100.0, le=100.0)]], _at_most(MOST_BIASES)] | None = None
    """Token ids, as text, with what is added to their logits."""
    seed: Seed | None = None
    stop: Annotated[list[str] | None, PlainValidator(_read_stop)] = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    max_tokens: Count | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    return_token_ids: bool | None = None
    """vLLM's extension: choices have `token_ids`."""
    ssd: SsdOptions | None = None

    @property
    def asked_tokens(self) -> int | None:
        """Most new tokens that were asked for."""
        return self.max_tokens

    @property
    def noted_logprobs(self) -> int | None:
        """Number of most probable tokens to report per token; None for no log-probabilities."""
        return None

    def check(self) -> None:
        """Raise ApiError for values that cannot be honoured."""
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options", "it is for streams; set `stream` to true, or omit it")
        self.structure()

    def structure(self) -> Structure | None:
        """The form of the answer; None for free text. Raises ApiError for one that cannot be read."""
        return structure_of(self.response_format, self.structured_outputs)


class ChatRequest(CommonRequest):
    """The body of `/v1/chat/completions`."""

    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MOST_MESSAGES)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    chat_template_kwargs: Annotated[dict[Name, Any], _at_most(32)] | None = None
    """vLLM's extension: variables of the chat template, such as `enable_thinking`."""
    reasoning_effort: Name | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MOST_TOOLS)] | None = None
    tool_choice: Name | NamedTool | None = None
    parallel_tool_calls: bool | None = None

    @property
    def asked_tokens(self) -> int | None:
        """Most new tokens; `max_completion_tokens` is the newer name."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def noted_logprobs(self) -> int | None:
        """Number of most probable tokens to report per token; None for no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def offered_tools(self) -> list[Tool]:
        """The tools that the model is shown: none if it must not call any."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def forced_tools(self) -> list[Tool]:
        """The tools one of which the answer must call; none if it need not call any."""
        if isinstance(self.tool_choice, NamedTool):
            wanted = self.tool_choice.function.name
            return [tool for tool in self.tools or [] if tool.function.name == wanted]
        return self.tools or [] if self.tool_choice == "required" else []

    @property
    def parallel(self) -> bool:
        """Whether an answer may have several calls."""
        return self.parallel_tool_calls is not False and not isinstance(self.tool_choice, NamedTool)

    def check(self) -> None:
        """Raise ApiError for values that cannot be honoured."""
        super().check()
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise invalid("max_completion_tokens", "it differs from `max_tokens`; give one of the two")
        if isinstance(self.tool_choice, str) and self.tool_choice not in ("none", "auto", "required"):
            raise invalid("tool_choice", f"expected {EXPECTED['tool_choice']}")
        if (isinstance(self.tool_choice, NamedTool) or self.tool_choice == "required") and not self.forced_tools:
            raise invalid("tool_choice", "no tool in `tools` can be called so; name one of them")
        if self.forced_tools and self.structure() is not None:
            raise invalid("tool_choice", "the answer is a call, so that it has no other form; omit one of the two")
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs", "it needs `logprobs`; set that to true, or omit it")


class CompletionRequest(CommonRequest):
    """The body of `/v1/completions`."""

    prompt: Annotated[list[str | list[int]], PlainValidator(_read_prompts)]
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None

    @property
    def noted_logprobs(self) -> int | None:
        """Number of most probable tokens to report per token; None for no log-probabilities."""
        return self.logprobs


Kind = TypeVar("Kind", ChatRequest, CompletionRequest)


def read_request(body: bytes, kind: type[Kind], context: int = 0) -> Kind:
    """Parse a body, whose prompt may have `context` token ids. Raises ApiError that names the first wrong field.

    Whatever the body holds, this takes bounded time and memory.
    """
    return checked(read_fields(body, context), kind)


def read_fields(body: bytes, context: int = 0) -> dict[str, Any]:
    """Parse a body's JSON object, as `read_request` does."""
    try:
        fields = read_json(body, context)
    except TooMuch as error:
        raise invalid(None, str(error), "request_too_large") from None
    except ValueError as error:
        raise invalid(None, f"the body is not JSON in UTF-8 ({error}); send a JSON object", "invalid_json") from None
    if not isinstance(fields, dict):
        raise invalid(None, f"expected a JSON object, got {type(fields).__name__}", "invalid_json")
    return fields


def checked(fields: Mapping[str, Any], kind: type[Kind]) -> Kind:
    """The request with these fields. Raises ApiError that names the first wrong one."""
    try:
        request = kind.model_validate(without_effect_removed(fields))
    except ValidationError as error:
        raise _first(error, fields) from None
    request.check()
    return request


def _first(error: ValidationError, body: Mapping[str, Any]) -> ApiError:
    """The first complaint, in OpenAI's form."""
    complaint = error.errors(include_url=False, include_context=False, include_input=False)[0]
    place = list(complaint["loc"])
    known = len(place) if complaint["type"] == "missing" else _length_in(body, place)
    names = [str(each) for each in place[:known]]
    # Names that the client chose, such as tokens' ids, are told in the message; `param` has the names of fields alone.
    chosen = [each for each in place[:known] if isinstance(each, str) and not each.isidentifier()]
    about = "".join(f"{each[:40]!r}: " for each in chosen)
    param = ".".join(each for each in names if each not in chosen) or None
    if known < len(place):
        expected = [EXPECTED[each] for each in names if each in EXPECTED]
        return invalid(param, f"{about}expected {expected[-1] if expected else 'a value of another type'}")
    if complaint["type"] == "extra_forbidden":
        return invalid(param, f"{about}this field is unknown here; omit it", "unknown_parameter")
    if complaint["type"] == "missing":
        return invalid(param, f"{about}it is missing; give it", "missing_required_parameter")
    told = complaint["msg"].removeprefix("Value error, ")
    return invalid(param, about + told[:1].lower() + told[1:])


def _length_in(body: Mapping[str, Any], place: Sequence[int | str]) -> int:
    """Number of the first parts of a place that lead through the body.

    pydantic appends the type that it tried to the place of a value that may have several.
    """
    value: Any = body
    for number, each in enumerate(place):
        if not (each in value if isinstance(value, dict) else isinstance(value, list) and isinstance(each, int)):
            return number
        value = value[each]
    return len(place)
