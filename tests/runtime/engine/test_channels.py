"""Answers in channels: thoughts, calls and the final answer are told apart, however the text comes."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from ssd_runtime.engine.output.channels import ChannelReader, said
from ssd_runtime.loading.loaded_model import CHANNEL, END, MESSAGE, OF_CALLS, OF_CHANNELS, START, LoadedModel
from ssd_runtime.serving.http.openai.calls.json_reader import JsonReader
from ssd_runtime.serving.http.openai.calls.tool_calls import joined
from tests.models import tiny_model
from tests.toy_tokenizers import KINDS

THOUGHT = f"{CHANNEL}analysis{MESSAGE}Hm. Let me see.{END}{START}assistant"
FINAL = f"{CHANNEL}final{MESSAGE}Hello!"
ARGUMENTS = '{"city": "Ulm"}'
CALLS = {
    "recipient first": f" to=functions.weather{CHANNEL}commentary json{MESSAGE}{ARGUMENTS}",
    "channel first": f"{CHANNEL}commentary to=functions.weather <|constrain|>json{MESSAGE}{ARGUMENTS}",
}


def read(text: str, cuts: list[int]) -> tuple[str, str]:
    reader, places = ChannelReader(), [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    parts = [reader.feed(text[begin:end]) for begin, end in pairwise(places)] + [reader.close()]
    thoughts, answers = ("".join(each) for each in zip(*parts, strict=True))
    return thoughts, answers


def calls_in(answer: str) -> list[tuple[str, str]]:
    reader = JsonReader(tools=["weather"])
    return [(call.name, call.arguments) for call in joined([*reader.feed(answer), *reader.close()])[1]]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (FINAL, ("", "Hello!")),
        (THOUGHT + FINAL, ("Hm. Let me see.", "Hello!")),
        (THOUGHT + FINAL + END, ("Hm. Let me see.", "Hello!")),
        (THOUGHT.removesuffix(f"{END}{START}assistant"), ("Hm. Let me see.", "")),
        (f"{CHANNEL}commentary{MESSAGE}First this.{END}{START}assistant{FINAL}", ("", "First this.Hello!")),
        ('{"a": 1}', ("", '{"a": 1}')),
        ("2 < 3", ("", "2 < 3")),
        (f"{CHANNEL}fin", ("", f"{CHANNEL}fin")),
        ("", ("", "")),
    ],
    ids=str,
)
def test_thoughts_are_told_apart_letter_by_letter_too(text: str, told: tuple[str, str]) -> None:
    assert read(text, []) == read(text, list(range(len(text)))) == told
    assert said(text) == told[1]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("before", ["", THOUGHT])
@pytest.mark.parametrize("after", ["", END])
def test_a_message_to_a_function_is_a_call(before: str, call: str, after: str) -> None:
    for cuts in ([], list(range(300))):
        thoughts, answer = read(before + CALLS[call] + after, cuts)
        assert thoughts == ("Hm. Let me see." if before else "")
        assert calls_in(answer) == [("weather", ARGUMENTS)]


def test_calls_follow_each_other() -> None:
    text = f"{CALLS['channel first']}{END}{START}assistant{CALLS['recipient first']}"
    assert calls_in(read(text, [7, 60])[1]) == [("weather", ARGUMENTS)] * 2


@given(
    st.lists(st.sampled_from([*OF_CHANNELS, "analysis", "final", " to=f", "<|", "x ", "{"]), max_size=9).map("".join)
)
def test_pieces_make_no_difference(text: str) -> None:
    assert read(text, list(range(len(text)))) == read(text, [])


@pytest.mark.parametrize("shown", [OF_CHANNELS, OF_CALLS])
def test_texts_show_what_parts_channels_and_calls_and_no_end(shown: tuple[str, ...]) -> None:
    tokenizer = KINDS["byte_level"]()
    plain = LoadedModel.of(tiny_model("llama", vocab_size=600), tokenizer)
    ids = tokenizer("the</s>", add_special_tokens=False)["input_ids"]
    assert not plain.has_channels
    assert plain.decode(ids) == "the"
    tokenizer.add_special_tokens({"additional_special_tokens": list(shown)})
    loaded = LoadedModel.of(tiny_model("llama", vocab_size=600), tokenizer)
    assert loaded.has_channels == (shown is OF_CHANNELS)
    text = "the".join(shown)
    assert loaded.decode(tokenizer(f"{text}</s>", add_special_tokens=False)["input_ids"]) == text


def test_a_token_that_ends_answers_is_not_shown_though_no_flag_makes_it_special() -> None:
    tokenizer = KINDS["byte_level"]()
    tokenizer.add_tokens([AddedToken("<|done|>", special=False)])
    model = tiny_model("llama", vocab_size=600)
    [end] = tokenizer.encode("<|done|>", add_special_tokens=False)
    model.generation_config.eos_token_id = [end]
    assert LoadedModel.of(model, tokenizer).decode(tokenizer.encode("the<|done|>", add_special_tokens=False)) == "the"
