"""A file's tokenizer gives llama.cpp's ids: those recorded from it, and its own where its Python package is there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unicodedata import normalize

import pytest
from transformers import PreTrainedTokenizerFast

from ssd_artifacts.fingerprint import tokenizer_sha256
from ssd_profiles.errors import UserError
from ssd_runtime.loading.gguf.pre_tokenizers import PRE_TOKENIZERS, REFUSED
from ssd_runtime.loading.gguf.tokenizer import gguf_tokenizer, save_tokenizer
from ssd_runtime.weights.gguf.index import GgufIndex
from tests.runtime.gguf.vocabularies import CONTROL, RECORDED, byte_level, sentencepiece, with_tokens, write_vocabulary
from tests.texts import TEXTS

KINDS = {
    **{name: byte_level(name) for name in PRE_TOKENIZERS if name in RECORDED["ids"]},
    "sentencepiece": sentencepiece(add_space_prefix=True),
    "sentencepiece without prefix": sentencepiece(add_space_prefix=False),
}
BYTE_LEVEL_TOKENS = len(KINDS["qwen2"]["tokenizer.ggml.tokens"])
MARKS = {"नमस्ते दुनिया", "สวัสดีชาวโลก", "e\u0301 a\u0308 n\u0303"}
CASES = {"HelloWorldFooBar", "camelCaseAndPascalCase", "iPhone XMLHttpRequest", "year2024month11"}
APPROXIMATED = {
    "tekken": MARKS,
    "gpt-4o": MARKS,
    "tiny_aya": CASES,
    "youtu": CASES,
    "qwen2": {"e\u0301 a\u0308 n\u0303"},
    "qwen35": {"e\u0301 a\u0308 n\u0303"},
}
"""Texts that llama.cpp cuts otherwise than the models' own expressions, which it changed for its engine: its letters
have no marks, or its words no inner capitals; or it does not put letters and marks together. Ours are the models'
own."""


def tokenizer_of(path: Path, metadata: dict[str, Any]) -> tuple[Any, list[int]]:
    write_vocabulary(path, metadata)
    return gguf_tokenizer(GgufIndex.read(path))


def differing(tokenizer: Any, expected: dict[str, list[int]]) -> set[str]:
    """The texts whose ids are others than expected."""
    return {text for text, ids in expected.items() if tokenizer(text)["input_ids"] != ids}


@pytest.mark.parametrize("kind", KINDS)
def test_sixty_texts_have_the_ids_that_were_recorded(kind: str, tmp_path: Path) -> None:
    tokenizer, _ = tokenizer_of(tmp_path / "v.gguf", KINDS[kind])
    expected = dict(zip(TEXTS, RECORDED["ids"][kind], strict=True))
    assert differing(tokenizer, expected) <= APPROXIMATED.get(kind, set())


@pytest.mark.parametrize("kind", KINDS)
def test_sixty_texts_have_the_ids_of_an_installed_llama_cpp(kind: str, tmp_path: Path) -> None:
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    tokenizer, _ = tokenizer_of(tmp_path / "v.gguf", KINDS[kind])
    theirs = llama_cpp.Llama(str(tmp_path / "v.gguf"), vocab_only=True, verbose=False)
    expected = {text: theirs.tokenize(text.encode(), add_bos=True, special=True) for text in TEXTS}
    assert differing(tokenizer, expected) <= APPROXIMATED.get(kind, set())


@pytest.mark.parametrize("kind", ["qwen2", "sentencepiece"])
def test_a_tokenizer_is_read_back_as_it_was_written(kind: str, tmp_path: Path) -> None:
    """Its list of added tokens is what transformers finds in the tokenizer itself."""
    made, _ = tokenizer_of(tmp_path / "v.gguf", KINDS[kind])
    made.save_pretrained(tmp_path / "stock")
    save_tokenizer(made, tmp_path / "ours")
    stock, ours = (PreTrainedTokenizerFast.from_pretrained(tmp_path / name) for name in ("stock", "ours"))
    assert ours.added_tokens_decoder == stock.added_tokens_decoder == made.added_tokens_decoder != {}
    texts = [*TEXTS, " a".join(KINDS[kind]["tokenizer.ggml.tokens"][-3:])]
    assert [ours(text)["input_ids"] for text in texts] == [stock(text)["input_ids"] for text in texts]
    assert ours.special_tokens_map == stock.special_tokens_map
    assert ours.backend_tokenizer.to_str() == stock.backend_tokenizer.to_str()
    assert tokenizer_sha256(ours, None) == tokenizer_sha256(made, None)


def test_pieces_without_scores_merge_in_the_vocabularys_order(tmp_path: Path) -> None:
    """Converters that know no scores write the same for all; SentencePiece's own fall with a piece's number."""
    kind = "sentencepiece"
    own, _ = tokenizer_of(tmp_path / "own.gguf", KINDS[kind])
    flat = {**KINDS[kind], "tokenizer.ggml.scores": [-1000.0] * len(KINDS[kind]["tokenizer.ggml.tokens"])}
    falling = [-float(number) for number in range(len(flat["tokenizer.ggml.tokens"]))]
    expected, _ = tokenizer_of(tmp_path / "falling.gguf", {**flat, "tokenizer.ggml.scores": falling})
    got, _ = tokenizer_of(tmp_path / "flat.gguf", flat)
    assert not differing(got, {text: expected(text)["input_ids"] for text in TEXTS})
    assert own("the")["input_ids"]


@pytest.mark.parametrize(
    ("bound", "message"), [("MOST_MERGES", "made of more than 9 pairs"), ("MOST_LETTERS", "more than 9 letters in all")]
)
def test_a_vocabulary_of_pairs_without_end_is_refused(
    bound: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"ssd_runtime.loading.gguf.tokenizer.{bound}", 9)
    with pytest.raises(UserError, match=message):
        tokenizer_of(tmp_path / "v.gguf", KINDS["sentencepiece"])


def test_every_way_of_cutting_was_recorded() -> None:
    ways = {name: replace(each, nfc=False) for name, each in PRE_TOKENIZERS.items()}
    assert set(ways.values()) == {ways[name] for name in ways if name in RECORDED["ids"]}
    distinct = {tuple(map(tuple, RECORDED["ids"][kind])) for kind in KINDS}
    assert len(distinct) >= len(KINDS) - 6, "texts that tell pre-tokenizers apart"


def test_a_name_is_converted_or_refused_with_its_reason(tmp_path: Path) -> None:
    assert not set(PRE_TOKENIZERS) & set(REFUSED)
    for name, reason in {**REFUSED, "of-tomorrow": "it is not known here"}.items():
        with pytest.raises(UserError, match=f"'{name}' is not supported .{reason}") as caught:
            tokenizer_of(tmp_path / "v.gguf", byte_level("default") | {"tokenizer.ggml.pre": name})
        assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_decoding_gives_the_text_back(kind: str, tmp_path: Path) -> None:
    tokenizer, _ = tokenizer_of(tmp_path / "v.gguf", KINDS[kind])
    for text in (text for text in TEXTS if "<" not in text):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        text = normalize("NFC", text) if kind in ("qwen2", "qwen35") else text
        assert tokenizer.decode(ids) in (text, text.removeprefix(" "))


@pytest.mark.parametrize(
    ("metadata", "begins"),
    [
        (byte_level("llama-bpe"), True),
        (byte_level("llama-bpe") | {"tokenizer.ggml.add_bos_token": False}, False),
        (byte_level("qwen2"), False),
        (byte_level("qwen2") | {"tokenizer.ggml.add_bos_token": True}, True),
        (sentencepiece(add_space_prefix=True), True),
        (sentencepiece(add_space_prefix=True) | {"tokenizer.ggml.add_bos_token": False}, False),
    ],
)
def test_a_text_begins_with_bos_where_the_file_or_its_kind_says(
    metadata: dict[str, Any], begins: bool, tmp_path: Path
) -> None:
    tokenizer, _ = tokenizer_of(tmp_path / "v.gguf", metadata)
    assert (tokenizer("Hello")["input_ids"][0] == tokenizer.bos_token_id) == begins
    assert tokenizer.bos_token_id not in tokenizer("Hello", add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("mark", ["$A", "$B:1", "a:b", "<s>:7", "bos"])
def test_a_text_begins_and_ends_with_tokens_of_any_name(mark: str, tmp_path: Path) -> None:
    names = {f"{mark}{place}": CONTROL for place in ("", ":end")}
    roles = dict(zip(("bos", "eos"), names, strict=True))
    adding = {f"tokenizer.ggml.add_{role}_token": True for role in roles}
    tokenizer, _ = tokenizer_of(tmp_path / "v.gguf", with_tokens(byte_level("qwen2"), names, **roles) | adding)
    ids = tokenizer("Hello")["input_ids"]
    assert ids == [tokenizer.bos_token_id, *tokenizer("Hello", add_special_tokens=False)["input_ids"], ids[-1]]
    assert tokenizer.convert_ids_to_tokens([ids[0], ids[-1]]) == list(names)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_sentencepieces_own_ids_are_those_that_the_vocabulary_has(count: int, tmp_path: Path) -> None:
    tokens = ["<unk>", "<s>", "</s>"][:count]
    metadata = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens}
    tokenizer, _ = tokenizer_of(tmp_path / "v.gguf", metadata | {"tokenizer.ggml.scores": [0.0] * count})
    assert (tokenizer.unk_token, tokenizer.bos_token, tokenizer.eos_token) == (*tokens, None, None)[:3]


@pytest.mark.parametrize(
    ("kind", "about", "strips"),
    [
        ("sentencepiece", {"general.architecture": "phi3", "general.name": "Model"}, True),
        ("sentencepiece", {"general.name": "Phi3"}, True),
        ("sentencepiece", {"general.name": "Phi-3 mini"}, True),
        ("sentencepiece", {"general.name": "Phi 3 Mini 4k Instruct"}, True),
        ("sentencepiece", {"general.name": "another"}, False),
        ("gpt-4o", {"general.architecture": "phi3", "general.name": "Phi 4 Mini Instruct"}, False),
    ],
)
def test_special_tokens_of_phi_3_take_the_spaces_after_them_along(
    kind: str, about: dict[str, Any], strips: bool, tmp_path: Path
) -> None:
    """Phi-4 is of the same architecture, but its tokens leave spaces alone."""
    tokenizer, _ = tokenizer_of(tmp_path / "v.gguf", KINDS[kind] | about)
    apart, together = (tokenizer(f"<|im_start|>{spaces}user")["input_ids"] for spaces in (" \n", ""))
    assert (apart == together) == strips
    assert tokenizer("<s> user")["input_ids"] != tokenizer("<s>user")["input_ids"]


@pytest.mark.parametrize(
    ("tokens", "roles", "ends"),
    [
        ({"<|endoftext|>": 3}, {"eos": "<|endoftext|>"}, {"<|endoftext|>", "<|im_end|>"}),
        ({"<stop>": 3}, {"eos": "<|im_end|>", "eot": "<stop>"}, {"<|im_end|>", "<stop>"}),
        ({"<stop>": 3}, {"eos": "<|im_end|>", "eom": "<stop>"}, {"<|im_end|>", "<stop>"}),
        ({"<|eot_id|>": 1}, {}, {"<|im_end|>", "<|eot_id|>"}),
        ({"</s>": 1}, {}, {"<|im_end|>"}),
        ({"</s>": 4}, {}, {"<|im_end|>"}),
        ({"<eos>": 1, "<turn|>": 1}, {}, {"<|im_end|>", "<eos>", "<turn|>"}),
        ({"</s>": 3, "<|file_sep|>": 3}, {}, {"<|im_end|>", "</s>", "<|file_sep|>"}),
        ({"<|end|>": 3}, {}, {"<|im_end|>", "<|end|>"}),
        ({"<|user|>": 3, "<|observation|>": 3}, {"eot": "<|user|>"}, {"<|im_end|>", "<|user|>", "<|observation|>"}),
        ({"<|end|>": 3, "<|return|>": 3, "<|call|>": 3}, {}, {"<|im_end|>", "<|return|>", "<|call|>"}),
        (
            {"<|end|>": 3, "<|flush|>": 3, "<|calls|>": 3},
            {"eot": "<|end|>"},
            {"<|im_end|>", "<|flush|>", "<|calls|>"},
        ),
    ],
)
def test_an_answer_ends_at_every_token_that_says_so(
    tokens: dict[str, int], roles: dict[str, str], ends: set[str], tmp_path: Path
) -> None:
    tokenizer, found = tokenizer_of(tmp_path / "v.gguf", with_tokens(byte_level("qwen2"), tokens, **roles))
    assert set(tokenizer.convert_ids_to_tokens(found)) == ends


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.merges": ["a zz"]}, "merges tokens to 'azz', which it lacks"),
        (
            {"tokenizer.ggml.merges": ["<|im_start|> <|im_end|>"]},
            r"merges tokens to '<\|im_start\|><\|im_end\|>', which it",
        ),
        ({"tokenizer.ggml.merges": [" a"]}, "its tokenizer: transformers cannot load it .*out of vocabulary"),
        ({"tokenizer.ggml.merges": None}, "has no merges of tokens"),
        ({"tokenizer.ggml.pre": None}, r"lacks the metadata tokenizer\.ggml\.pre; convert it again"),
        ({"tokenizer.ggml.merges": [1, 2]}, "its tokenizer: transformers cannot load it"),
        ({"tokenizer.ggml.token_type": ["1"] * BYTE_LEVEL_TOKENS}, "token types are no whole numbers"),
        ({"tokenizer.ggml.token_type": [1.0] * BYTE_LEVEL_TOKENS}, "token types are no whole numbers"),
        ({"tokenizer.chat_template": b"\xff{{ x }}"}, "chat_template is not UTF-8"),
        ({"tokenizer.chat_template": "mistral-v7"}, "chat_template 'mistral-v7' is a name that llama.cpp knows"),
        ({"tokenizer.ggml.token_type": [1, 2]}, "2 token types for"),
        ({"tokenizer.ggml.add_space_prefix": True}, "add_space_prefix is True"),
        ({"tokenizer.ggml.suppress_tokens": 1}, "suppress_tokens is not known here"),
        ({"tokenizer.ggml.precompiled_charsmap": [1, 2]}, "precompiled_charsmap is not known here"),
    ],
)
def test_a_vocabulary_that_cannot_be_followed_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message) as caught:
        tokenizer_of(tmp_path / "v.gguf", byte_level("qwen2") | changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("score", [float("nan"), float("inf"), "x", 1])
def test_scores_that_are_no_finite_numbers_are_refused(score: Any, tmp_path: Path) -> None:
    scores = [score] * len(KINDS["sentencepiece"]["tokenizer.ggml.tokens"])
    with pytest.raises(UserError, match="has no finite score for each of"):
        tokenizer_of(tmp_path / "v.gguf", KINDS["sentencepiece"] | {"tokenizer.ggml.scores": scores})
