"""Structures that cannot be honoured, or only at a price, take bounded time and end in one line."""

from __future__ import annotations

import json
import random
import sys
import time
from typing import Any

import pytest
import torch

from ssd_runtime.structure.grammars import MOST_KEPT, Grammars
from ssd_runtime.structure.structure import MOST_CHARACTERS, Structure, StructureError
from tests.structures import structured_model
from tests.toy_tokenizers import metaspace

LOADED = structured_model()
GRAMMARS = LOADED.grammars
VOCABULARY = LOADED.model.config.vocab_size
DEEP: dict[str, Any] = {"type": "string"}
for _ in range(400):
    DEEP = {"anyOf": [DEEP, {"type": "null"}]}
HOSTILE = {
    "regex": [
        *("(a+)+b", "((a{1,100}){1,100}){1,100}", "a{1000000}", "(x+x+)+y", "(.|\n)*a(.|\n){200}b", "(?=a)b", "\\1"),
        *(
            "(" * 20_000 + "a" + ")" * 20_000,
            "|".join(f"w{n}" for n in range(9000)),
            "(.{0,300}x){0,300}",
            "[",
            "a{9,1}",
        ),
        *("", "[^\\x00-\\x{10FFFF}]", "(a{1,50}b{1,50}){1,50}(c{1,50}|d{1,90}){1,50}", "\\p{L}{1,500}\\p{N}{1,500}"),
    ],
    "json_schema": [
        json.dumps(each)
        for each in (
            *(DEEP, {"$ref": "#"}, {"$ref": "http://example.org/x"}, {"not": {}}, {"type": "foo"}, {"enum": []}),
            {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
            {"properties": {f"p{n}": {"type": "string"} for n in range(1500)}},
            {"properties": {f"p{n}": {"enum": [f"v{k}" for k in range(50)]} for n in range(100)}},
            {"allOf": [{"type": "string", "pattern": f"(a|b)*a(a|b){{{n}}}"} for n in range(5, 15)]},
            {"allOf": [{"anyOf": [{"properties": {f"{k}{n}": {}}} for k in "ab"]} for n in range(16)]},
            {"type": "integer", "multipleOf": 999_999_937},
            {"type": "integer", "minimum": 1, "maximum": 10**300},
            {"type": "string", "minLength": 100_000, "maxLength": 10**6},
            {"type": "array", "items": {"type": "array", "minItems": 10**5}, "minItems": 10**5},
            {"oneOf": [{"properties": {f"k{n}": {"type": "string"}}} for n in range(60)]},
        )
    ],
    "grammar": [
        *('start: a\na: a a | "x" | ""\n', 'start: start start start | "x"\n', "start: foo", "", "start: ", "\0"),
        *("start: " + "(" * 5000 + '"a"' + ")" * 5000, "start: A\nA: /(a|b)*a(a|b){30}/\n", "start: %json {", "::="),
        "start: r0\n" + "".join(f"r{n}: r{n + 1} r{n + 1}\n" for n in range(60)) + 'r60: "a"\n',
    ],
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_structures_take_bounded_time(kind: Any) -> None:
    """They are refused in one line, or followed for a while; both end soon."""
    draw = random.Random(1)
    for text in HOSTILE[kind]:
        began = time.process_time()
        refused = ""
        try:
            matcher = GRAMMARS.compiled(Structure(kind, text)).matcher()
            answer = list[int]()
            while len(answer) < 20 and not matcher.completes(answer):
                tokens = (matcher.masked(torch.zeros(VOCABULARY), answer, ()) == 0.0).nonzero()[:, 0].tolist()
                answer.append(draw.choice(tokens))
        except StructureError as error:
            refused = str(error)
        assert "\n" not in refused
        assert len(refused) < 400
        assert time.process_time() - began < 5.0, text[:80]


def test_what_cannot_be_honoured_is_refused_in_one_line() -> None:
    for make, told in (
        (lambda: Structure("regex", "a" * (MOST_CHARACTERS + 1)), "give at most"),
        (lambda: Structure.json_schema("{"), "is not JSON"),
        (lambda: Structure.json_schema("[]"), "a JSON object"),
        (lambda: Structure.choice([]), "one or more"),
        (lambda: GRAMMARS.compiled(Structure.json_schema({"type": "array", "uniqueItems": True})), "uniqueItems"),
        (lambda: GRAMMARS.compiled(Structure("regex", "[^\\x00-\\x{10FFFF}]")), "nothing matches it"),
        (lambda: Grammars(metaspace(), VOCABULARY, ()).compiled(Structure("regex", "a")), "tokenizer"),
    ):
        with pytest.raises(StructureError, match=told) as error:
            make()
        assert "\n" not in str(error.value)


def test_without_the_extra_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(StructureError, match=r"pip install 'ssd-decoding\[structured\]'"):
        Grammars(LOADED.tokenizer, VOCABULARY, ()).compiled(Structure("regex", "a"))


def test_compiled_grammars_are_kept_up_to_a_number() -> None:
    grammars = Grammars(LOADED.tokenizer, VOCABULARY, LOADED.eos_ids)
    first = Structure("regex", "a")
    kept = grammars.compiled(first)
    assert grammars.compiled(Structure("regex", "a")) is kept
    for number in range(MOST_KEPT):
        grammars.compiled(Structure("regex", f"b{number}"))
    assert grammars.compiled(first) is not kept
