"""Messages of a conversation: what a client sends back is read, and calls are told from text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletionMessage, ParsedChatCompletionMessage
from openai.types.chat.chat_completion_chunk import ChoiceDelta
from pydantic import BaseModel

from ssd_runtime.serving.http.app import Service
from ssd_runtime.serving.http.openai.errors import ApiError
from ssd_runtime.serving.http.openai.messages import Message
from ssd_runtime.serving.http.openai.requests import ChatRequest, read_request
from ssd_runtime.serving.http.openai.tool_calls import CLOSE, OPEN, ParsedCall, ToolCallReader
from tests.folders import TEXTS, save_tiny_model
from tests.serving import serving, tiny_engine, tiny_service

QUESTION = {"role": "user", "content": TEXTS[0]}
TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}: "
    "{% if m.reasoning_content %}({{ m.reasoning_content }}) {% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}({{ call.function.arguments | tojson }}){% endfor %}"
    "{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}<s>assistant: {% endif %}"
)
CALL = {"id": "call_1", "type": "function", "function": {"name": "loaves", "arguments": '{"day": 3}'}}
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
def service(tmp_path_factory: pytest.TempPathFactory) -> Service:
    return tiny_service(tiny_engine(save_tiny_model(tmp_path_factory.mktemp("model"))), template=TEMPLATE)


@pytest.fixture(scope="module")
def client(service: Service) -> Iterator[openai.OpenAI]:
    with serving(service) as address:
        yield openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)


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
        ({"role": "assistant", "content": "x", "nonsense": None}, "messages.0.nonsense"),
        ({"role": "user", "content": "x", "refusal": "no"}, "messages.0.refusal"),
        ({"role": "user", "content": "x", "parsed": {"n": 1}}, "messages.0.parsed"),
        ({"role": "user", "content": None, "refusal": None}, "messages.0.content"),
        ({"role": "system", "content": "x", "tool_calls": [CALL]}, "messages.0.tool_calls"),
        ({"role": "assistant", "tool_calls": [{"id": "x"}]}, "messages.0.tool_calls"),
        ({"role": "assistant", "audio": {"id": "audio_1"}}, "messages.0.audio.transcript"),
        ({"role": "assistant", "function_call": {"name": "f", "arguments": "three"}}, "messages.0.function_call"),
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


TOOL_CALL = f'{OPEN}\n{{"name": "weather", "arguments": {{"city": "Würzburg <b>"}}}}\n{CLOSE}'
CALLING_TEXTS = st.lists(
    st.sampled_from([TOOL_CALL, OPEN, CLOSE, "Let me look. ", "<", "<tool", " ", f"{OPEN}not JSON{CLOSE}", "ü"]),
    max_size=6,
).map("".join)


BARE = '{"name": "weather", "parameters": {"city": "Ulm"}}'
BARE_TEXTS = st.lists(st.sampled_from([BARE, TOOL_CALL, "[", "]", ", ", " ", "{", "}", "It rains. "]), max_size=5).map(
    "".join
)


def parts_of(
    text: str, cuts: list[int], most: int | None = None, bare: tuple[str, ...] = ()
) -> tuple[str, list[tuple[str, str]]]:
    """The text and the calls that come out when the text arrives in pieces."""
    reader = ToolCallReader(most, bare)
    places = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    parts = [part for begin, end in pairwise(places) for part in reader.feed(text[begin:end])]
    parts += reader.close()
    words = "".join(part for part in parts if isinstance(part, str))
    return words, [(part.name, part.arguments) for part in parts if isinstance(part, ParsedCall)]


@given(text=CALLING_TEXTS, cuts=st.lists(st.integers(0, 200), max_size=8))
def test_pieces_make_no_difference(text: str, cuts: list[int]) -> None:
    words, calls = parts_of(text, cuts)
    whole_words, whole_calls = parts_of(text, [])
    assert calls == whole_calls
    assert words.split() == whole_words.split()


@given(text=BARE_TEXTS, cuts=st.lists(st.integers(0, 200), max_size=8))
def test_pieces_make_no_difference_to_calls_without_tags(text: str, cuts: list[int]) -> None:
    words, calls = parts_of(text, cuts, bare=("weather",))
    whole_words, whole_calls = parts_of(text, [], bare=("weather",))
    assert calls == whole_calls
    assert words.split() == whole_words.split()
    if not calls:
        assert words == text


def test_blanks_between_words_are_kept_after_a_call_too() -> None:
    text = f"{TOOL_CALL}\nIt rains in  Ulm.\n\n{TOOL_CALL}\n"
    words, calls = parts_of(text, list(range(len(text))))
    assert len(calls) == 2
    assert words == "\nIt rains in  Ulm."


def test_an_answer_that_is_a_call_without_tags_is_one_only_where_that_is_the_models_form() -> None:
    call = ("weather", '{"city": "Ulm"}')
    assert parts_of(f" {BARE}\n", [3, 9], bare=("weather",)) == ("", [call])
    assert parts_of(f"[{BARE}, {BARE}]", [1], bare=("weather", "time")) == ("", [call, call])
    assert parts_of(BARE, [3]) == (BARE, [])
    for text in (BARE, f"[{BARE}, 5]", "{}", "[]", f"It is {BARE}", f"{BARE} rain"):
        assert parts_of(text, [2], bare=("time",) if text == BARE else ("weather",)) == (text, [])
    assert parts_of(f"{OPEN}[{BARE}, {BARE}]{CLOSE}", []) == ("", [call, call])


@given(before=st.sampled_from(["", "Let me look. "]), after=st.sampled_from(["", " Done."]))
def test_a_call_is_taken_out_of_the_text(before: str, after: str) -> None:
    words, [(name, arguments)] = parts_of(before + TOOL_CALL + after, [5])
    assert words == before + after
    assert (name, json.loads(arguments)) == ("weather", {"city": "Würzburg <b>"})


@given(text=st.text(alphabet="<tol_caen>{}/ ", max_size=40))
def test_text_without_calls_is_unchanged(text: str) -> None:
    assert parts_of(text, [3, 7]) == (text, [])


def test_a_call_may_end_with_the_answer() -> None:
    assert len(parts_of(TOOL_CALL.removesuffix(CLOSE), [])[1]) == 1
    cut = TOOL_CALL[:30]
    assert parts_of(cut, []) == (cut, [])


def test_calls_beyond_the_limit_are_dropped() -> None:
    assert len(parts_of(TOOL_CALL * 3, [])[1]) == 3
    assert len(parts_of(TOOL_CALL * 3, [], most=1)[1]) == 1
