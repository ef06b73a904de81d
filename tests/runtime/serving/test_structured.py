"""Answers with a shape over HTTP, as OpenAI's own client asks for them."""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel

from ssd_runtime.serving.http.openai.answers.responses import chat_body
from ssd_runtime.serving.http.openai.calls.call_forms import (
    BARE,
    LISTED,
    TAGGED,
    CallForm,
    JsonCall,
)
from tests.folders import TEXTS, save_tiny_model
from tests.serving import QUESTION, TOOL_TEMPLATE, serving, tiny_engine, tiny_service
from tests.structures import allows

SCHEMA: dict[str, Any] = {
    "type": "object",
    "$defs": {"day": {"enum": ["monday", "tuesday"]}},
    "properties": {"day": {"$ref": "#/$defs/day"}, "loaves": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["day", "loaves"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "count", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "rest", "parameters": {"properties": {}, "additionalProperties": False}}},
]


class Loaves(BaseModel):
    baker: Literal["Ada", "Bob"]
    fresh: bool


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), context=1024)


WRITTEN = "{{ call.function.name }}({{ call.function.arguments | tojson }})"
OBJECT = '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
FORMS = {
    "tags": f"<tool_call>\n{OBJECT}\n</tool_call>",
    "mark": "[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}",
    "elements": (
        "<function={{ call.function.name }}>{% for key, value in call.function.arguments.items() %}"
        "<parameter={{ key }}>{{ value if value is string else value | tojson }}</parameter>{% endfor %}</function>"
    ),
    "none": "",
}
"""Ways in which a chat template writes a call."""


@pytest.fixture(scope="module", params=FORMS)
def client(folder: Path, request: pytest.FixtureRequest) -> Iterator[openai.OpenAI]:
    """A server whose chat template writes calls in one of several forms."""
    assert WRITTEN in TOOL_TEMPLATE
    template = TOOL_TEMPLATE.replace(WRITTEN, FORMS[request.param])
    with serving(tiny_service(tiny_engine(folder), template=template, temperature=1.0)) as address:
        yield openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def plain_client(folder: Path) -> Iterator[openai.OpenAI]:
    with serving(tiny_service(tiny_engine(folder))) as address:
        yield openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    fields = {"max_tokens": 200, "seed": 5, **fields}
    return client.chat.completions.create(model="tiny", messages=QUESTION, **fields)


def test_formats_hold_whole_and_streamed(plain_client: openai.OpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "loaves", "schema": SCHEMA, "strict": True}}
    whole = ask(plain_client, response_format=form, n=2, logprobs=True, top_logprobs=3)
    for choice in whole.choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content), SCHEMA)
    chunks = list(ask(plain_client, response_format=form, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == "stop"
    anything = ask(plain_client, response_format={"type": "json_object"}, max_tokens=30).choices[0]
    assert anything.message.content.startswith("{")
    if anything.finish_reason == "stop":
        json.loads(anything.message.content)
    for wanted, pattern in (
        ({"regex": "(ab){3}"}, "(ab){3}"),
        ({"choice": ["the baker", "the bread"]}, "the baker|the bread"),
        ({"grammar": 'root ::= "a" "b"'}, "ab"),
        ({"json": {"enum": [5]}}, "5"),
    ):
        assert re.fullmatch(
            pattern, ask(plain_client, extra_body={"structured_outputs": wanted}).choices[0].message.content
        )
    legacy = plain_client.completions.create(
        model="tiny", prompt=["a", "b"], max_tokens=9, extra_body={"structured_outputs": {"regex": "[xyz]{4}"}}
    )
    assert all(re.fullmatch("[xyz]{4}", choice.text) for choice in legacy.choices)


def test_openais_client_parses_a_model_of_pydantic(plain_client: openai.OpenAI) -> None:
    answer = plain_client.chat.completions.parse(
        model="tiny", messages=QUESTION, response_format=Loaves, max_tokens=99, temperature=1.0, seed=1
    )
    assert isinstance(answer.choices[0].message.parsed, Loaves)


def test_forced_calls_are_calls(client: openai.OpenAI) -> None:
    for choice, names in (
        ("required", {"count", "rest"}),
        ({"type": "function", "function": {"name": "count"}}, {"count"}),
    ):
        answer = ask(client, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False).choices[0]
        assert answer.finish_reason == "tool_calls"
        assert not answer.message.content
        [call] = answer.message.tool_calls
        assert call.function.name in names
        if call.function.name == "count":
            jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
        chunks = list(ask(client, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, stream=True))
        deltas = [each for chunk in chunks for each in chunk.choices[0].delta.tool_calls or []]
        assert {each.index for each in deltas} == {0}
        assert "".join(each.function.name or "" for each in deltas) == call.function.name
        assert json.loads("".join(each.function.arguments or "" for each in deltas)) == json.loads(
            call.function.arguments
        )


def test_a_format_leaves_the_choice_of_a_call(client: openai.OpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "loaves", "schema": SCHEMA}}
    for seed in range(4):
        message = (
            ask(client, tools=TOOLS, response_format=form, seed=seed, parallel_tool_calls=False).choices[0].message
        )
        if message.tool_calls:
            assert {call.function.name for call in message.tool_calls} <= {"count", "rest"}
        else:
            jsonschema.validate(json.loads(message.content), SCHEMA)


@pytest.mark.parametrize("form", [BARE, TAGGED, LISTED], ids=["bare", "tagged", "listed"])
def test_calls_in_a_row_are_allowed_where_the_form_has_them(form: CallForm) -> None:
    tools = [(tool["function"]["name"], tool["function"]["parameters"]) for tool in TOOLS]
    assert isinstance(form.call, JsonCall)
    call = f'{{"name": "rest", "{form.call.arguments}": {{}}}}'
    one = form.opening + call + form.closing
    two = form.opening + call + (form.between or "\n") + call + form.closing
    only = [form.structure(tools, parallel) for parallel in (False, True)]
    either = form.structure(tools, True, otherwise=SCHEMA)
    for text, structure, allowed in (
        (one, only[1], True),
        (two, only[1], form is not BARE),
        (two, only[0], False),
        (two, either, form is not BARE),
        ('{"day": "monday", "loaves": 5}', either, True),
        ('{"day": "monday", "loaves": 5}', only[1], False),
    ):
        assert allows(structure, text) == allowed


def test_structures_that_cannot_be_used_are_refused_and_others_go_on(plain_client: openai.OpenAI) -> None:
    for wanted, told in (
        ({"regex": "("}, "regular expression"),
        ({"regex": "a{1000000}"}, "too complex"),
        ({"json": {"uniqueItems": True}}, "uniqueItems"),
        ({"grammar": "start: foo"}, "foo"),
    ):
        with pytest.raises(openai.BadRequestError, match=told) as refused:
            ask(plain_client, extra_body={"structured_outputs": wanted})
        assert "\n" not in refused.value.body["message"]
    slow = "start: A\nA: /(.*a.{13})/ & /(.*b.{12})/ & ~/.*c.{10}/\n"
    attacks = [threading.Thread(target=attack, args=(plain_client, slow + "// " + "x" * n)) for n in range(2)]
    for each in attacks:
        each.start()
    waits = list[float]()
    while any(each.is_alive() for each in attacks) and len(waits) < 20:
        began = time.monotonic()
        ask(plain_client, max_tokens=1)
        waits.append(time.monotonic() - began)
    for each in attacks:
        each.join()
    assert max(waits) < 5.0


def attack(client: openai.OpenAI, grammar: str) -> None:
    with contextlib.suppress(openai.BadRequestError):
        ask(client, extra_body={"structured_outputs": {"grammar": grammar}}, max_tokens=2)


def test_thoughts_and_effort_of_responses_are_those_of_chats() -> None:
    def thoughts(text: str) -> dict[str, Any]:
        return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}

    call = {"type": "function_call", "call_id": "c", "name": "loaves", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "12"}
    answer = {"role": "assistant", "content": "Twelve."}
    history = [{"role": "user", "content": "?"}, thoughts("Hm."), call, output, thoughts("So."), answer, answer]
    body = chat_body({"input": history, "reasoning": {"effort": "low"}})
    assert body["chat_template_kwargs"] == {"reasoning_effort": "low"}
    _, asked, told, final, again = body["messages"]
    assert (asked["reasoning_content"], asked["tool_calls"][0]["id"]) == ("Hm.", "c")
    assert told["role"] == "tool"
    assert final == {**answer, "reasoning_content": "So."}
    assert again == answer
    assert chat_body({"input": [{"type": "reasoning", "encrypted_content": "x"}]})["messages"] == []


@pytest.mark.parametrize("forced", [False, True])
def test_responses_are_those_of_chats(client: openai.OpenAI, forced: bool) -> None:
    """OpenAI's own client reads them, whole and streamed, and takes an earlier answer back as input."""
    tool = {"type": "function", **TOOLS[0]["function"]}
    form = {"type": "json_schema", "name": "loaves", "schema": SCHEMA}
    asked: dict[str, Any] = {"model": "tiny", "instructions": "Count.", "max_output_tokens": 200, "temperature": 0.0}
    asked |= (
        {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
        if forced
        else {"text": {"format": form}}
    )
    whole = client.responses.create(input=TEXTS[0], **asked)
    assert (whole.status, whole.object) == ("completed", "response")
    assert whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
    item = whole.output[0]
    text = item.arguments if item.type == "function_call" else whole.output_text
    jsonschema.validate(json.loads(text), SCHEMA)
    events = list(client.responses.create(input=TEXTS[0], stream=True, **asked))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    for event in events:
        assert type(event).model_validate(event.model_dump(by_alias=True, exclude_unset=True))
    told = "".join(event.delta for event in events if event.type.endswith(".delta"))
    assert told == text
    last = events[-1]
    assert last.type == "response.completed"
    assert [each.type for each in last.response.output] == [each.type for each in whole.output]
    outputs: list[Any] = [
        {"type": "function_call_output", "call_id": each.call_id, "output": "12"}
        for each in whole.output
        if each.type == "function_call"
    ]
    history: Any = [{"role": "user", "content": "?"}, *(each.model_dump() for each in whole.output), *outputs]
    if not forced:
        for each in history[1:]:
            del each["id"], each["status"]
    cut = client.responses.create(model="tiny", input=history, max_output_tokens=2)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    with pytest.raises(openai.BadRequestError, match="send the whole conversation"):
        client.responses.create(model="tiny", input="?", previous_response_id="resp_1")
    for wrong in ({"input": 5}, {"input": [5]}, {"input": "?", "tools": 5}, {"input": "?", "text": 5}, {"nonsense": 1}):
        with pytest.raises(openai.BadRequestError):
            client.post("/responses", body={"model": "tiny", **wrong}, cast_to=object)
