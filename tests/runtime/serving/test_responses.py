"""`/v1/responses` takes and refuses the fields of a chat, and its answers are JSON whatever a request holds."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ssd_runtime.serving.http.openai.requests.fields import IGNORED_SAFELY, UNSUPPORTED
from ssd_runtime.serving.http.openai.requests.json_bounds import read_json
from tests.folders import TEXTS
from tests.serving import chat, send


def response(address: str, **fields: Any) -> tuple[int, Any]:
    status, _, body = send(address, "/v1/responses", {"input": TEXTS[0], "max_output_tokens": 2, **fields})
    return status, body


def test_fields_without_effect_are_those_of_chats(address: str) -> None:
    """Ignored or refused by both, for the same reason."""
    for name in (*IGNORED_SAFELY, *UNSUPPORTED):
        for value in (None, "x", *(UNSUPPORTED[name].harmless if name in UNSUPPORTED else ())):
            status, body = response(address, max_output_tokens=1, **{name: value})
            expected, of_chat = chat(address, max_tokens=1, **{name: value})
            assert (status, body.get("error")) == (expected, of_chat.get("error")), (name, value)


def test_what_cannot_be_honoured_is_refused_wherever_it_stands(address: str) -> None:
    for value, status in ((None, 200), ("medium", 200), ("low", 400)):
        assert response(address, text={"verbosity": value})[0] == status
        assert chat(address, verbosity=value)[0] == status
    assert response(address, top_logprobs=0, include=["reasoning.encrypted_content"], nonsense=None)[0] == 200
    for fields in ({"top_logprobs": 1}, {"include": ["message.output_text.logprobs"]}, {"nonsense": 1}):
        status, body = response(address, **fields)
        assert (status, body["error"]["param"]) == (400, *fields)


NUMBERS = ["1e400", "-1e309", "1E+0400", f"{'9' * 400}.0", "1.7976931348623159e308"]


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("stream", ["true", "false"])
def test_numbers_past_the_range_of_floats_are_refused(address: str, number: str, stream: str) -> None:
    """The answer would repeat them, and JSON has no infinity."""
    for path, prompt in (("responses", '"input": "x"'), ("completions", '"prompt": "x"')):
        body = f'{{{prompt}, "stream": {stream}, "metadata": {{"a": [{{"b": {number}}}]}}}}'
        status, _, answer = send(address, f"/v1/{path}", body.encode())
        assert (status, answer["error"]["code"]) == (400, "invalid_json")


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    value=st.recursive(
        st.from_regex(r"-?(0|[1-9][0-9]{0,4})(\.[0-9]{1,3})?([eE][+-]?[0-9]{1,3})?", fullmatch=True),
        lambda inner: (
            st.lists(inner, max_size=3).map(lambda parts: f"[{','.join(parts)}]")
            | inner.map(lambda part: f'{{"1e400": {part}}}')
        ),
        max_leaves=5,
    )
)
def test_what_is_read_can_be_written(value: str) -> None:
    """Without infinities; and what Python reads without them is read."""
    try:
        json.dumps(json.loads(value), allow_nan=False)
    except ValueError:
        with pytest.raises(ValueError, match="too large"):
            read_json(value.encode())
    else:
        assert read_json(value.encode()) == json.loads(value)
