"""The bodies of requests, checked field by field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from ssd_profiles.prompts import is_text
from ssd_runtime.serving.http.openai.errors import ApiError, invalid
from ssd_runtime.serving.http.openai.fields import without_effect_removed
from ssd_runtime.serving.http.openai.messages import Message, Strict, Text

MOST_STOPS = 4
MOST_CHOICES = 16
EXPECTED = {
    "prompt": "text, a list of texts, token ids, or a list of these; none of them empty",
    "stop": "text, or a list of up to four texts",
    "content": "text, or a list of parts",
    "tool_choice": "`auto` or `none`",
    "parameters": "text or a number",
}
"""The values of fields that have several types."""
Seed = Annotated[int, Field(ge=-(1 << 63), le=(1 << 63) - 1)]
Count = Annotated[int, Field(ge=1, le=1 << 31)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]


class StreamOptions(Strict):
    """Options of a streamed answer."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    """Padding against listeners who count bytes: OpenAI's own clients ask for it to be off. None is added here."""


class SsdOptions(Strict):
    """Our extension: how to decode. The answer does not depend on it."""

    strategy: str | None = None
    parameters: dict[str, str | int | float] = Field(default_factory=dict, max_length=16)


class ResponseFormat(BaseModel):
    """The form of the answer; only free text is built."""

    model_config = ConfigDict(strict=True)
    type: str


class Function(Strict):
    """A function that the model may call; `parameters` is a JSON schema, which the template shows to the model."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function


class CommonRequest(Strict):
    """Fields of both endpoints."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=1 << 31)] | None = None
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100.0)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] | None = None
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100.0, le=100.0)]], Field(max_length=1024)] | None = None
    """Token ids, as text, with what is added to their logits."""
    seed: Seed | None = None
    stop: str | list[str] | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    max_tokens: Count | None = None
    response_format: ResponseFormat | None = None
    return_token_ids: bool | None = None
    """vLLM's extension: choices have `token_ids`."""
    ssd: SsdOptions | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings. Raises ApiError for more than four, or an empty one."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stops) > MOST_STOPS:
            raise invalid("stop", f"at most {MOST_STOPS} strings, got {len(stops)}")
        if "" in stops:
            raise invalid("stop", "an empty string would end every answer at once; omit it")
        return tuple(stops)

    @property
    def asked_tokens(self) -> int | None:
        """Most new tokens that were asked for."""
        return self.max_tokens

    @property
    def noted_logprobs(self) -> int | None:
        """Number of most probable tokens to report per token; None for no log-probabilities."""
        return None

    @property
    def wants_usage_chunk(self) -> bool:
        """Whether the stream ends with a chunk of usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def check(self) -> None:
        """Raise ApiError for values that cannot be honoured."""
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options", "it is for streams; set `stream` to true, or omit it")
        if self.response_format is not None and self.response_format.type != "text":
            raise invalid(
                "response_format",
                "answers cannot be held to a format here, so `text` is the only type; ask for JSON in the prompt",
                "unsupported_parameter",
            )


class ChatRequest(CommonRequest):
    """The body of `/v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=32)] | None = None
    """vLLM's extension: variables of the chat template, such as `enable_thinking`."""
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
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

    def check(self) -> None:
        """Raise ApiError for values that cannot be honoured."""
        super().check()
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise invalid("max_completion_tokens", "it differs from `max_tokens`; give one of the two")
        if self.tool_choice not in (None, "none", "auto"):
            raise invalid(
                "tool_choice",
                "the model cannot be made to call a tool here; give `auto` or `none`",
                "unsupported_parameter",
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise invalid("top_logprobs", "it needs `logprobs`; set that to true, or omit it")


class CompletionRequest(CommonRequest):
    """The body of `/v1/completions`."""

    prompt: (
        Text | TokenIds | Annotated[list[Text], Field(min_length=1)] | Annotated[list[TokenIds], Field(min_length=1)]
    )
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None

    @property
    def noted_logprobs(self) -> int | None:
        """Number of most probable tokens to report per token; None for no log-probabilities."""
        return self.logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, as texts or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [[each for each in self.prompt if isinstance(each, int)]]
        return [each for each in self.prompt if not isinstance(each, int)]


Kind = TypeVar("Kind", ChatRequest, CompletionRequest)


def read_request(body: bytes, kind: type[Kind]) -> Kind:
    """Parse a body. Raises ApiError that names the first field that is wrong."""
    try:
        fields = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise invalid(None, f"the body is not JSON in UTF-8 ({error}); send a JSON object", "invalid_json") from None
    if not isinstance(fields, dict):
        raise invalid(None, f"expected a JSON object, got {type(fields).__name__}", "invalid_json")
    if not is_text(repr(fields)):
        raise invalid(None, "the body holds half of a character (a lone surrogate); send whole ones", "invalid_json")
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
    return invalid(param, about + complaint["msg"][:1].lower() + complaint["msg"][1:])


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
