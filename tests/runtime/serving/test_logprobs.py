"""Tokens' texts, bytes and offsets add up to the answer's text, whatever the tokenizer."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from ssd_runtime.serving.http.logits import TokenLogprobs
from ssd_runtime.serving.http.openai.answers.logprobs import PositionReader, chat_logprobs, completion_logprobs
from ssd_runtime.serving.http.token_bytes import TokenBytes
from tests.toy_tokenizers import ADDED, KINDS, SPECIAL

WORDS = st.sampled_from(
    ["the", " the", "  the", " ", "th", "he", "für", "日本", "😀", "👩‍👩‍👧", "\n", *ADDED, *SPECIAL]
)
SOME = st.lists(WORDS | st.text(max_size=4), max_size=8).map("".join)


@cache
def tokenizer_of(kind: str) -> PreTrainedTokenizerBase:
    return KINDS[kind]()


@cache
def bytes_of(kind: str) -> TokenBytes:
    tokenizer = tokenizer_of(kind)
    return TokenBytes(tokenizer, {token for token, each in tokenizer.added_tokens_decoder.items() if each.special})


def read(kind: str, tokens: list[int], top: list[int]) -> list[Any]:
    entries = [TokenLogprobs([(each, -2.0) for each in top], token=token, logprob=-1.0) for token in tokens]
    return PositionReader(bytes_of(kind)).read(entries)


def answer_of(kind: str, tokens: list[int]) -> str:
    return str(tokenizer_of(kind).decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def is_whole(data: bytes) -> bool:
    try:
        return bool(data.decode() or True)
    except UnicodeDecodeError:
        return False


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40)
@given(data=st.data())
def test_bytes_of_tokens_add_up_to_the_text(kind: str, data: st.DataObject) -> None:
    """Also for tokens in orders in which no text has them."""
    tokenizer = tokenizer_of(kind)
    encoded = SOME.map(lambda text: list(tokenizer.encode(text, add_special_tokens=False)))
    tokens = data.draw(encoded | st.lists(st.integers(0, len(tokenizer) + 3), max_size=12))
    positions = read(kind, tokens, [])
    joined = b"".join(each.chosen.bytes for each in positions)
    text = answer_of(kind, tokens)
    if "ByteFallback" in repr(tokenizer.backend_tokenizer.decoder) and not is_whole(joined):
        return  # the decoder has one replacement for each byte of a broken character, and Python one for all
    assert joined.decode(errors="replace") == text
    for position in positions:
        if position.chosen.bytes and not position.chosen.name.startswith("token_id:"):
            assert text[position.offset :].startswith(position.chosen.name)
    assert [each.offset for each in positions] == sorted(each.offset for each in positions)


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_past_the_vocabulary_leaves_the_next_one_first(kind: str) -> None:
    """Weights are often padded to more tokens than the vocabulary has; some decoders drop the first one's space."""
    tokens = [len(tokenizer_of(kind)), *tokenizer_of(kind).encode(" the", add_special_tokens=False)]
    assert b"".join(each.chosen.bytes for each in read(kind, tokens, [])).decode() == answer_of(kind, tokens)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40)
@given(data=st.data())
def test_different_tokens_have_different_names(kind: str, data: st.DataObject) -> None:
    ids = st.integers(0, len(tokenizer_of(kind)) - 1)
    tokens = data.draw(st.lists(ids, min_size=1, max_size=4))
    top = data.draw(st.lists(ids, unique=True, max_size=12))
    positions = read(kind, tokens, top)
    for token, position in zip(tokens, positions, strict=True):
        assert len({each.name for each in [position.chosen, *position.top]}) == len({token, *top})
    listed = completion_logprobs(positions)
    assert [name in each for name, each in zip(listed["tokens"], listed["top_logprobs"], strict=True)] == [True] * len(
        tokens
    )
    assert [len(each) for each in listed["top_logprobs"]] == [len({token, *top}) for token in tokens]
    assert all(entry["bytes"] is not None for entry in chat_logprobs(positions)["content"])


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40)
@given(data=st.data())
def test_a_stream_that_goes_on_has_the_same_positions(kind: str, data: st.DataObject) -> None:
    tokens = data.draw(st.lists(st.integers(0, len(tokenizer_of(kind)) - 1), max_size=10))
    cut = data.draw(st.integers(0, len(tokens)))
    reader = PositionReader(bytes_of(kind))
    reader.skip(tokens[:cut])
    entries = [TokenLogprobs([], token=each, logprob=-1.0) for each in tokens[cut:]]
    assert reader.read(entries) == read(kind, tokens, [])[cut:]


def test_a_leading_space_and_the_parts_of_a_character_are_told() -> None:
    tokenizer = tokenizer_of("llama")
    the, bare = (tokenizer.convert_tokens_to_ids(piece) for piece in ("▁th", "th"))
    first, second = read("llama", [the, the], [bare])
    assert (first.chosen.name, first.chosen.bytes, first.top[0].name) == ("th", b"th", f"token_id:{bare}")
    assert (second.chosen.name, second.chosen.bytes, second.top[0].name) == (" th", b" th", "th")
    for kind in ("byte_level", "llama", "gemma"):
        tokens = tokenizer_of(kind).encode("x🎈y", add_special_tokens=False)
        parts = [each for each in read(kind, tokens, []) if each.chosen.name.startswith("token_id:")]
        assert len(parts) > 1
        assert b"".join(each.chosen.bytes for each in parts) == "🎈".encode()
        assert len({each.offset for each in parts}) == 1
