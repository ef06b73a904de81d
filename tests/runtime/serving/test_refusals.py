"""Whatever a body says, it is honoured or refused by name, and never a defect of the server."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ssd_runtime.model.decoder import Decoder
from ssd_runtime.serving.http.openai.requests.fields import IGNORED_SAFELY, UNSUPPORTED
from ssd_runtime.serving.http.openai.requests.requests import ChatRequest, CompletionRequest
from tests.serving import QUESTION, chat, send, serving, tiny_engine, tiny_service

BODIES = int(os.environ.get("SSD_BODIES", "150"))
"""Bodies of requests that are made up; CONTRIBUTING.md says when to try more."""


CODES = {
    "nonsense: ": "unknown_parameter",
    "tools: ": "unsupported_parameter",
    "guided_regex: ": "unsupported_parameter",
}
"""Codes of the errors that are no invalid values."""


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"nonsense": 1}, "nonsense: "),
        ({"messages": []}, "messages: "),
        ({"messages": [{"role": "user"}]}, "messages.0.content: "),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role: "),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content: "),
        ({"temperature": -1}, "temperature: "),
        ({"temperature": "hot"}, "temperature: "),
        ({"top_p": 1.5}, "top_p: "),
        ({"max_tokens": 0}, "max_tokens: "),
        ({"max_tokens": 401}, "max_tokens: "),
        ({"max_tokens": 4, "max_completion_tokens": 5}, "max_completion_tokens: "),
        ({"stop": [str(number) for number in range(33)]}, "stop: "),
        ({"stop": ""}, "stop: "),
        ({"n": 17}, "n: "),
        ({"seed": 1 << 63}, "seed: "),
        ({"stream_options": {"include_usage": True}}, "stream_options: "),
        ({"response_format": {"type": "xml"}}, "response_format.type: "),
        ({"response_format": {"type": "json_schema"}}, "response_format: "),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs: "),
        ({"guided_regex": "a"}, "guided_regex: "),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools: "),
        *(
            ({"tools": [{"type": "function", "function": {"name": name}}]}, "tools.0.function.name: ")
            for name in ("get weather", "a/b", "wétter", "", "a" * 65, "a\n")
        ),
        ({"tool_choice": "required"}, "tool_choice: "),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice: "),
        ({"logit_bias": {"500000": 10}}, "logit_bias: "),
        ({"logit_bias": {"x": 10}}, "logit_bias: "),
        ({"presence_penalty": 2.5}, "presence_penalty: "),
        ({"top_logprobs": 3}, "top_logprobs: "),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs: "),
        ({"ssd": {"strategy": "nonsense"}}, "ssd.strategy: "),
        ({"ssd": {"strategy": "knn"}}, "ssd.strategy: "),
        ({"ssd": {"strategy": "clasp", "parameters": {"x": 1}}}, "ssd.parameters: "),
        ({"logit_bias": {"5": 101}}, "logit_bias: '5': input should be less than or equal to 100"),
        ({"logit_bias": {"5": -100.5}}, "logit_bias: '5': input should be greater than or equal to -100"),
        ({"logit_bias": {"str": 101}}, "logit_bias.str: input should be less than or equal to 100"),
        ({"logit_bias": {"5": "x"}}, "logit_bias: '5': input should be a valid number"),
        ({"logit_bias": {"5": None}}, "logit_bias: '5': input should be a valid number"),
        ({"logit_bias": [5]}, "logit_bias: input should be a valid dictionary"),
        ({"stop": [1]}, "stop: expected text, or a list of up to 32 texts"),
        ({"ssd": {"parameters": {"x": []}}}, "ssd.parameters.x: expected text or a number"),
        ({"ssd": {"parameters": {"a-b": []}}}, "ssd.parameters: 'a-b': expected text or a number"),
        ({"messages": [{"role": "user", "content": [1]}]}, "messages.0.content: expected text"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_honoured_is_refused_by_name(address: str, fields: Any, says: str) -> None:
    """A name that the client chose, such as a token's id, is no name of a type."""
    status, body = chat(address, **fields)
    assert status == 400, body
    assert body["error"]["type"] == "invalid_request_error"
    assert body["error"]["param"] == says.partition(":")[0]
    assert body["error"]["code"] == CODES.get(says, "invalid_value")
    assert body["error"]["message"].startswith(says)


def test_log_probabilities_that_are_not_asked_for_are_none(address: str) -> None:
    for fields in ({"logprobs": False, "top_logprobs": 0}, {"top_logprobs": 0}):
        status, body = chat(address, **fields)
        assert status == 200, body
        assert body["choices"][0]["logprobs"] is None


def test_too_many_answers_are_refused_under_a_field_that_was_sent(folder: Path) -> None:
    """Whichever limit they pass: that of a request, or that of the server's places."""
    for places, most in ((70, 64), (2, 2)):
        with serving(tiny_service(tiny_engine(folder), places=places)) as own:
            for prompts, n, param in ((most, 1, None), (most + 1, 1, "prompt"), (most // 2 + 1, 2, "n")):
                fields = {"prompt": ["a"] * prompts, "n": n, "max_tokens": 1}
                status, _, body = send(own, "/v1/completions", fields if n > 1 else {**fields, "n": None})
                assert (status, body.get("error", {}).get("param")) == (200 if param is None else 400, param)


@pytest.mark.parametrize("forwards", [0, 3], ids=["in its first step", "later"])
def test_a_request_for_which_memory_runs_out_may_come_again(
    forwards: int, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, run = iter(range(forwards)), Decoder.run

    def scarce(*given: Any, **named: Any) -> Any:
        if next(left, None) is None:
            raise MemoryError
        return run(*given, **named)

    monkeypatch.setattr(Decoder, "run", scarce)
    status, body = chat(address, max_tokens=32)
    assert (status, body["error"]["code"]) == (503, "out_of_memory")
    assert body["error"]["message"].endswith("; ask for less, or later")


def test_what_other_servers_have_added_is_ignored(address: str) -> None:
    """Clients send it back in messages and tools, and send null for what they do not use."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}", "x": 1}, "extra_content": {}}
    messages = [
        {"role": "user", "content": "Why?", "id": "u1"},
        {"role": "assistant", "content": None, "tool_calls": [call], "provider_specific_fields": {"refusal": None}},
        {"role": "tool", "content": "5", "tool_call_id": "1", "cache_control": {}},
    ]
    status, body = chat(address, messages=messages, prompt_logprobs=None, top_a=None)
    assert status == 200, body
    assert chat(address, stop=[f"stop {number}" for number in range(32)])[0] == 200


def test_every_field_of_openais_interface_is_known(address: str) -> None:
    """Honoured, refused with a reason, or ignored with a reason: the client's own list of fields has no other."""
    from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParams
    from openai.types.completion_create_params import CompletionCreateParamsBase as CompletionParams

    known = set(IGNORED_SAFELY) | set(UNSUPPORTED)
    assert set(ChatParams.__annotations__) - known <= set(ChatRequest.model_fields)
    assert set(CompletionParams.__annotations__) - known <= set(CompletionRequest.model_fields)
    assert chat(address, **dict.fromkeys(IGNORED_SAFELY, "x"))[0] == 200
    harmless = {name: each.harmless[0] for name, each in UNSUPPORTED.items() if each.harmless}
    assert chat(address, **harmless)[0] == 200
    for name in UNSUPPORTED:
        assert chat(address, **{name: None})[0] == 200
        status, body = chat(address, **{name: {"some": "value"}})
        assert (status, body["error"]["code"]) == (400, "unsupported_parameter")


def test_errors_have_openais_form_whatever_is_wrong(address: str) -> None:
    long = {"messages": [{"role": "user", "content": "word " * 600}]}
    path = "/v1/chat/completions"
    for status, code, answer in (
        (404, "not_found", send(address, "/v1/nothing", {})),
        (405, "method_not_allowed", send(address, path, {}, "GET")),
        (415, "unsupported_media_type", send(address, path, {}, **{"Content-Type": "text/plain"})),
        (413, "request_too_large", send(address, path, b" " * 30_000)),
        (400, "invalid_json", send(address, path, b"{")),
        (400, "invalid_json", send(address, path, b"[1]")),
        (400, "invalid_json", send(address, path, b"\xff{}")),
        (400, "invalid_json", send(address, path, b'{"user": "\\ud800"}')),
        (400, "invalid_json", send(address, path, b"[" * 5000)),
        (400, "missing_required_parameter", send(address, path, {})),
        (404, "model_not_found", send(address, path, {"model": "other", "messages": QUESTION})),
        (404, "model_not_found", send(address, "/v1/models/other", b"", "GET")),
        (400, "context_length_exceeded", send(address, path, long)),
        (400, "invalid_value", send(address, "/v1/completions", {"prompt": [5, 100_000]})),
        (400, "invalid_value", send(address, "/v1/completions", {"prompt": ""})),
    ):
        assert answer[0] == status, answer
        assert set(answer[2]["error"]) == {"message", "type", "param", "code"}
        assert answer[2]["error"]["code"] == code
    assert send(address, "/v1/models", b"", "GET")[2]["data"][0]["id"] == "tiny"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
FIELDS = sorted({*ChatRequest.model_fields, *CompletionRequest.model_fields, *UNSUPPORTED, *IGNORED_SAFELY})
VALUES: list[Any] = [0, 1, 2, 0.5, -1, 1e-300, 1e300, 1 << 64, True, "", "x", "auto", [], ["x"], [[5]], [5, 6], {}]
LIKELY = st.sampled_from(
    [*VALUES, QUESTION, QUESTION * 2, [{"role": "tool", "content": "x", "tool_call_id": "1"}], {"include_usage": True}]
)


@settings(max_examples=BODIES, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    path=st.sampled_from(["/v1/chat/completions", "/v1/completions"]),
    fields=st.dictionaries(st.sampled_from(FIELDS), LIKELY | JSON, max_size=4),
    given_prompt=st.booleans(),
)
def test_no_body_is_a_servers_error(address: str, path: str, fields: dict[str, Any], given_prompt: bool) -> None:
    prompt = ({"messages": QUESTION} if "chat" in path else {"prompt": "x"}) if given_prompt else {}
    body: dict[str, Any] = {**prompt, "max_tokens": 2, **fields}
    status, headers, answer = send(address, path, body)
    assert status in (200, 400, 404), answer
    if status != 200:
        assert set(answer["error"]) == {"message", "type", "param", "code"}
    elif isinstance(answer, bytes):
        assert headers["content-type"].startswith("text/event-stream")
        assert answer.endswith(b"data: [DONE]\n\n")
        assert b'"error"' not in answer


@settings(max_examples=BODIES // 4, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_no_bytes_are_a_servers_error(address: str, body: bytes) -> None:
    assert send(address, "/v1/chat/completions", body)[0] == 400
