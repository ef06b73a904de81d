"""Messages of a conversation: what a client sends back is read."""

from __future__ import annotations

import json
import re
from pathlib import Path
from threading import Event
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessage, ParsedChatCompletionMessage
from openai.types.chat.chat_completion_chunk import ChoiceDelta
from pydantic import BaseModel

from ssd_runtime.serving.http.app import Service
from ssd_runtime.serving.http.openai.answers.events import event_of
from ssd_runtime.serving.http.openai.calls.tool_calls import ParsedCall
from ssd_runtime.serving.http.openai.errors import ApiError
from ssd_runtime.serving.http.openai.requests.generation_requests import chat_requests
from ssd_runtime.serving.http.openai.requests.json_bounds import MOST_NESTS
from ssd_runtime.serving.http.openai.requests.messages import Message
from ssd_runtime.serving.http.openai.requests.prompt_encoder import PromptEncoder
from ssd_runtime.serving.http.openai.requests.requests import ChatRequest, read_request
from ssd_runtime.serving.http.openai.requests.tools import Tool
from ssd_runtime.templates.renderer import TemplateLate
from tests.folders import TEXTS
from tests.serving import TOOL_TEMPLATE, tiny_engine, tiny_service

QUESTION = {"role": "user", "content": TEXTS[0]}
TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}: "
    "{% if m.reasoning_content %}({{ m.reasoning_content }}) {% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}({{ call.function.arguments | tojson }}){% endfor %}"
    "{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}<s>assistant: {% endif %}"
)
CALL = {"id": "call_1", "type": "function", "function": {"name": "loaves", "arguments": '{"day": 3}'}}
CUT = {**CALL, "function": {**CALL["function"], "arguments": '{"day'}}  # type: ignore[dict-item]
PARSED_CALL = {**CALL, "function": {**CALL["function"], "parsed_arguments": {"day": 3}}}  # type: ignore[dict-item]
CITATION = {
    "type": "url_citation",
    "url_citation": {"start_index": 0, "end_index": 2, "title": "Loaves", "url": "https://loaves.example"},
}
SOUND = {"id": "audio_1", "data": "AAAA", "expires_at": 1, "transcript": "Twelve."}
CUSTOM = {"id": "call_1", "type": "custom", "custom": {"name": "loaves", "input": "three"}}
KINDS: list[tuple[type[BaseModel], dict[str, Any], str]] = [
    (ChatCompletionMessage, {"content": "Twelve."}, "Twelve."),
    (ChatCompletionMessage, {"content": "Twelve.", "annotations": [CITATION]}, "Twelve."),
    (ChatCompletionMessage, {"content": None}, ""),
    (ChatCompletionMessage, {"content": None, "refusal": "I will not count."}, "I will not count."),
    (ChatCompletionMessage, {"content": None, "audio": SOUND}, "Twelve."),
    (ChatCompletionMessage, {"content": "", "tool_calls": [CALL]}, 'loaves({"day": 3})'),
    (ChatCompletionMessage, {"content": None, "tool_calls": [CALL]}, 'loaves({"day": 3})'),
    (ChatCompletionMessage, {"content": None, "tool_calls": [CUSTOM]}, 'loaves({"input": "three"})'),
    (ChatCompletionMessage, {"content": None, "tool_calls": [CUT]}, 'loaves({"arguments": "{\\"day"})'),
    (ChatCompletionMessage, {"content": None, "function_call": CALL["function"]}, 'loaves({"day": 3})'),
    (ChatCompletionMessage, {"content": "Twelve.", "reasoning_content": None, "name": None}, "Twelve."),
    (ChatCompletionMessage, {"content": "Twelve.", "reasoning_content": "3 x 4"}, "(3 x 4) Twelve."),
    (ChatCompletionMessage, {"content": "Twelve.", "reasoning": "3 x 4"}, "(3 x 4) Twelve."),
    (ParsedChatCompletionMessage, {"content": '{"n": 12}', "parsed": {"n": 12}}, '{"n": 12}'),
    (ParsedChatCompletionMessage, {"content": None, "tool_calls": [PARSED_CALL]}, 'loaves({"day": 3})'),
    (ChoiceDelta, {"content": "Twelve."}, "Twelve."),
    (ChoiceDelta, {"content": None, "tool_calls": [{"index": 0, **CALL}]}, 'loaves({"day": 3})'),
    (ChoiceDelta, {"tool_calls": [{"index": 0, **CALL, "type": None}]}, 'loaves({"day": 3})'),
]


@pytest.fixture(scope="module")
def service(folder: Path) -> Service:
    return tiny_service(tiny_engine(folder), template=TEMPLATE)


@pytest.mark.parametrize("left_out", [{}, {"exclude_unset": True}, {"exclude_none": True}], ids=str)
@pytest.mark.parametrize(("kind", "fields", "text"), KINDS)
def test_a_message_of_the_clients_types_is_read(
    service: Service, kind: type[BaseModel], fields: dict[str, Any], text: str, left_out: dict[str, bool]
) -> None:
    """What is said in it reaches the template; the rest repeats that."""
    dumped = kind.model_validate({"role": "assistant", **fields}).model_dump(**left_out)
    body = json.dumps({"messages": [QUESTION, dumped, QUESTION]}).encode()
    ids = service.encoder.chat(read_request(body, ChatRequest).messages, [])
    expected = f"<s>user: {TEXTS[0]}\n<s>assistant: {text}\n<s>user: {TEXTS[0]}\n<s>assistant: "
    assert service.encoder.loaded.tokenizer.decode(ids) == expected


@pytest.mark.parametrize("field", ["tool_calls", "function_call"])
def test_the_arguments_of_all_calls_have_a_bound_together(service: Service, field: str) -> None:
    """To build and to render what each of many calls may have would take a server seconds."""
    function = {"name": "f", "arguments": f'{{"x": [{", ".join(["{}"] * (MOST_NESTS // 2))}]}}'}
    called: Any = [{"function": function}] if field == "tool_calls" else function
    message = Message.model_validate({"role": "assistant", field: called})
    with pytest.raises(ApiError, match=f"the arguments of calls: it has more than {MOST_NESTS} lists and objects"):
        service.encoder.chat([message] * 2, [])


def test_gpt_oss_reads_thoughts_and_their_effort_by_names_of_its_own(service: Service) -> None:
    template = "{{ reasoning_effort or 'medium' }}{% for m in messages %}{{ m.thinking }}|{{ m.content }};{% endfor %}"
    encoder = PromptEncoder(service.encoder.loaded, template)
    thoughtful = {"role": "assistant", "reasoning": "3 x 4"}
    told = {**thoughtful, "content": "I look."}
    read = [Message.model_validate(message) for message in (thoughtful, told, {**told, "tool_calls": [CALL]})]
    for effort in ("low", None):
        asked = ChatRequest(messages=read, reasoning_effort=effort)
        ids = chat_requests(asked, encoder, service.settings, "s", Event())[0].ids
        text = encoder.loaded.tokenizer.decode(ids)
        assert text == f"{effort or 'medium'}3 x 4|;3 x 4|I look.;|I look.;"
    with pytest.raises(ApiError, match="no such setting"):
        chat_requests(
            ChatRequest(messages=read, reasoning_effort="low"), service.encoder, service.settings, "s", Event()
        )


def test_the_form_of_calls_is_found_once_the_template_answers_in_time(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy machine must not leave a server without calls for the rest of its life."""
    encoder = PromptEncoder(service.encoder.loaded, TOOL_TEMPLATE)

    def late(*given: Any, **named: Any) -> None:
        raise TemplateLate("it takes more than 5 s")

    with monkeypatch.context() as busy:
        busy.setattr(encoder.loaded.prompts, "render", late)
        with pytest.raises(ApiError) as refused:
            _ = encoder.call_form
        assert refused.value.status == 503
        with pytest.raises(ApiError) as refused:
            encoder.chat([Message(role="user", content="?")], [])
        assert refused.value.status == 503
    assert encoder.call_form == PromptEncoder(service.encoder.loaded, TOOL_TEMPLATE).call_form


def test_a_template_reads_what_clients_may_omit_of_a_tool(service: Service) -> None:
    shown = "tool.function.description + '!' + (tool.function.parameters.properties | string)"
    strict = f"{{% for tool in tools %}}{{{{ {shown} }}}}{{% endfor %}}?"
    encoder = PromptEncoder(service.encoder.loaded, strict)
    question = [Message(role="user", content="?")]
    bare = Tool.model_validate({"type": "function", "function": {"name": "f"}})
    written = service.encoder.loaded.decode(encoder.chat(question, [bare]))
    assert written.replace(" ", "").endswith("!{}?")


def test_ids_of_calls_are_those_that_mistrals_templates_take() -> None:
    assert re.fullmatch("[a-zA-Z0-9]{9}", ParsedCall("f", "{}").id)


@pytest.mark.parametrize("mark", ["\x85", "\u2028", "\u2029"])
def test_no_character_of_an_event_ends_its_line(mark: str) -> None:
    [line, _] = event_of({"content": f"a{mark}b"}).splitlines()
    assert json.loads(line.removeprefix("data: ")) == {"content": f"a{mark}b"}


def test_answers_whole_parsed_and_streamed_go_back_and_forth(client: openai.OpenAI) -> None:
    """The client's own objects, for a whole conversation."""
    messages: list[Any] = [QUESTION]
    # The client refuses to parse an answer that ends at the limit of tokens.
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 60, "stop": ["e", "a", "o", " "]}
    messages += [client.chat.completions.create(messages=messages, **asked).choices[0].message, QUESTION]
    messages += [client.chat.completions.create(messages=messages, **asked).choices[0].message.model_dump(), QUESTION]
    messages += [client.chat.completions.parse(messages=messages, **asked).choices[0].message.model_dump(), QUESTION]
    with client.chat.completions.stream(messages=messages, **asked) as stream:
        messages += [stream.get_final_completion().choices[0].message.model_dump(), QUESTION]
    whole = dict[str, Any]()
    for chunk in client.chat.completions.create(messages=messages, stream=True, **asked):
        for name, value in chunk.choices[0].delta.model_dump().items():
            whole[name] = whole[name] + value if isinstance(whole.get(name), str) and value else whole.get(name, value)
    assert client.chat.completions.create(messages=[*messages, whole, QUESTION], **asked).choices


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "content": "x", "refusal": "no"}, "messages.0.refusal"),
        ({"role": "user", "content": "x", "parsed": {"n": 1}}, "messages.0.parsed"),
        ({"role": "user", "content": None, "refusal": None}, "messages.0.content"),
        ({"role": "system", "content": "x", "tool_calls": [CALL]}, "messages.0.tool_calls"),
        ({"role": "assistant", "tool_calls": [{"id": "x"}]}, "messages.0.tool_calls"),
        ({"role": "assistant", "audio": {"id": "audio_1"}}, "messages.0.audio.transcript"),
    ],
    ids=str,
)
def test_what_says_nothing_to_this_model_is_refused(service: Service, message: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        service.encoder.chat(read_request(json.dumps({"messages": [message]}).encode(), ChatRequest).messages, [])
    assert refused.value.param == param


def test_every_field_of_the_clients_messages_is_known() -> None:
    """A new version of the client may bring fields that this server has to learn."""
    for kind in (ChatCompletionMessage, ParsedChatCompletionMessage, ChoiceDelta):
        assert set(kind.model_fields) <= set(Message.model_fields)
