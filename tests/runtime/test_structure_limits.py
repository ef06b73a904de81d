"""Structures that cannot be honoured, or only at a price, take bounded time and end in one line."""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AddedToken

from ssd_runtime.structure.grammars import MOST_KEPT, Grammars
from ssd_runtime.structure.structure import MOST_CHARACTERS, Structure, StructureError
from tests.structures import structured_model
from tests.toy_tokenizers import byte_level, metaspace

LOADED = structured_model()
GRAMMARS = LOADED.grammars
VOCABULARY = LOADED.model.config.vocab_size
TEXT = {"type": "string"}


def nested(depth: int, wrap: Callable[[Any], Any]) -> Any:
    """A string's schema in so many layers of another."""
    found: Any = TEXT
    for _ in range(depth):
        found = wrap(found)
    return found


def chain_of(count: int) -> Any:
    """Definitions each of which refers to the next one."""
    found = {f"{n}": {"items": {"$ref": f"#/$defs/{n + 1}"}} for n in range(count)}
    return {"$defs": found | {f"{count}": TEXT}, "$ref": "#/$defs/0"}


def chain_of_rules(name: str, repeats: str, count: int, head: str = "") -> str:
    """Rules, or terminals, each of which is the next one, repeated."""
    rules = "".join(f"{name}{n}{head}: {name}{n + 1}{repeats}\n" for n in range(count))
    return f'start: {name}0\n{rules}{name}{count}: "a"\n'


HOSTILE: dict[str, list[str]] = {
    "regex": [
        *("(a+)+b", "((a{1,100}){1,100}){1,100}", "a{1000000}", "(x+x+)+y", "(.|\n)*a(.|\n){200}b", "(?=a)b", "\\1"),
        *("(" * 20_000 + "a" + ")" * 20_000, "|".join(f"w{n}" for n in range(9000)), "(.{0,300}x){0,300}", "["),
        *("", "a{9,1}", "[^\\x00-\\x{10FFFF}]", "(a{1,50}b{1,50}){1,50}(c{1,50}|d{1,90}){1,50}"),
        *("\\p{L}{1,500}\\p{N}{1,500}", "(?:)", "a**", "(?i)straße{0,500}", "\\w{500}\\W{500}", "[a-z&&[^aeiou]]{3}"),
        *("(?P<x>a)(?P=x)", "(?<!a)b", "a\\b", "^^$$", "\\u{110000}", "\\xff\\xfe", "[\\ud800]", ".{65000}", "\0"),
        *("(a?){500}a{500}", "((((.*)*)*)*)*x", "(?s:.)*(?s:.){300}z", *(f"(a|b)*a(a|b){{{n}}}" for n in (12, 16, 20))),
    ],
    "json_schema": [
        json.dumps(each)
        for each in (
            nested(400, lambda inner: {"anyOf": [inner, {"type": "null"}]}),
            *(nested(14, lambda inner, key=key: {key: [inner, inner]}) for key in ("anyOf", "allOf")),
            nested(9, lambda inner: {"oneOf": [inner, {"type": "array", "items": inner}]}),
            nested(200, lambda inner: {"type": "array", "items": inner}),
            {"const": nested(300, lambda inner: [inner])},
            *({"$ref": "#"}, {"$ref": "http://example.org/x"}, {"$ref": "#/$defs/none"}, {"$ref": 5}, {"$id": "a"}),
            *({"not": {}}, {"type": "foo"}, {"enum": []}, {"type": []}, {"type": 5}, {"type": ["string", "string"]}),
            {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
            {"$defs": 5, "$ref": "#/$defs/a"},
            {"type": "object", "additionalProperties": {"$ref": "#"}},
            {"properties": {f"p{n}": TEXT for n in range(1500)}},
            {"properties": {f"p{n}": {"enum": [f"v{k}" for k in range(50)]} for n in range(100)}},
            {"type": "object", "properties": {"a": False}, "required": ["a"]},
            {"type": "object", "required": [f"r{n}" for n in range(500)]},
            {"type": "object", "minProperties": 10**6},
            {"patternProperties": {"(": TEXT}},
            {"patternProperties": {f"^{letter}.*$": TEXT for letter in "abcdefgh"}},
            {"propertyNames": {"pattern": "^a"}},
            {"dependentRequired": {"a": ["b"]}},
            {"if": TEXT, "then": TEXT},
            {"allOf": [{"type": "string", "pattern": f"(a|b)*a(a|b){{{n}}}"} for n in range(5, 15)]},
            {"allOf": [{"anyOf": [{"properties": {f"{k}{n}": {}}} for k in "ab"]} for n in range(16)]},
            {"allOf": [TEXT, {"type": "integer"}]},
            {"type": "integer", "multipleOf": 999_999_937},
            {"type": "integer", "minimum": 1, "maximum": 10**300},
            {"type": "integer", "minimum": "a"},
            {"type": "number", "minimum": 5, "maximum": 1},
            *({"type": "number", "multipleOf": step} for step in (0, 1e-300)),
            *({"type": "string", "minLength": least, "maxLength": most} for least, most in ((10**5, 10**6), (5, 1))),
            *({"type": "string", "pattern": pattern} for pattern in ("(", "(a+)+$(b|c){1,900}")),
            {"type": "string", "format": "\n"},
            {"type": "array", "items": {"type": "array", "minItems": 10**5}, "minItems": 10**5},
            {"type": "array", "minItems": 10**9},
            {"type": "array", "prefixItems": [TEXT] * 2000},
            {"type": "array", "contains": TEXT},
            {"oneOf": [{"properties": {f"k{n}": TEXT}} for n in range(60)]},
            *(chain_of(count) for count in (990, 1300)),
            *({"const": "\ud800"}, {"enum": ["x" * 60_000]}, {"enum": [{"a": n} for n in range(1500)]}),
            *({"x-guidance": {"whitespace_pattern": "("}}, {"x-guidance": 5}),
        )
    ],
    "grammar": [
        *('start: a\na: a a | "x" | ""\n', 'start: start start start | "x"\n', "start: foo", "", "start: ", "\0"),
        *("start: " + "(" * 5000 + '"a"' + ")" * 5000, "start: A\nA: /(a|b)*a(a|b){30}/\n", "start: %json {", "::="),
        "start: r0\n" + "".join(f"r{n}: r{n + 1} r{n + 1}\n" for n in range(60)) + 'r60: "a"\n',
        *("start: a\na: b\nb: a\n", 'start: "a"{1000000}\n', "%import common.X\nstart: X", "start: /(/", "start: @x\n"),
        *("start: <[999999999]>\n", "start: <|none|>\n", "start: A\nA: B\nB: A\n", "start[lazy]: /.*/\n"),
        *('root ::= root root | "a"', "root ::= [", 'root ::= "a"{5000000}', "root ::= " + "(" * 300),
        *(chain_of_rules(*kind, count) for kind in (("r", ""), ("r", "{0,9}"), ("A", "*")) for count in (195, 295)),
        chain_of_rules("r", "?", 4000),
        *(
            "\n" * 65_000,
            "\n" * 64_000 + 'start: "a"',
            "root ::= r0\n" + "".join(f"r{n} ::= r{n + 1}\n" for n in range(3600)),
        ),
        "root ::= r0\n" + "".join(f"r{n} ::= r{n + 1}\n" for n in range(3500)) + 'r3500 ::= "a"\n',
        "start: r\nr: " + " | ".join(f'"{n}" r' for n in range(3000)) + ' | "x"\n',
        "start: A\nA: /.*/ & /.*b.{30}/ & ~/.*c.{20}/\n",
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
        (lambda: GRAMMARS.compiled(Structure("grammar", chain_of_rules("r", "", 200))), "202 rules; give at most 200"),
        (
            lambda: GRAMMARS.compiled(Structure("grammar", chain_of_rules("r", "{0,9}", 900, '[capture="a:/b"]'))),
            "902 rules; give at most 200",
        ),
        (lambda: GRAMMARS.compiled(Structure.json_schema(chain_of(1300))), "1301 references; give at most 1000"),
        (lambda: GRAMMARS.compiled(Structure("regex", "[^\\x00-\\x{10FFFF}]")), "nothing matches it"),
        (lambda: Grammars(metaspace(), VOCABULARY, ()).compiled(Structure("regex", "a")), "tokenizer"),
    ):
        with pytest.raises(StructureError, match=told) as error:
            make()
        assert "\n" not in str(error.value)


def test_without_the_extra_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(StructureError, match=r"pip install '.\[structured\]'"):
        Grammars(LOADED.tokenizer, VOCABULARY, ()).compiled(Structure("regex", "a"))


def test_compiled_grammars_are_kept_up_to_a_number() -> None:
    grammars = Grammars(LOADED.tokenizer, VOCABULARY, LOADED.eos_ids)
    first = Structure("regex", "a")
    kept = grammars.compiled(first)
    assert grammars.compiled(Structure("regex", "a")) is kept
    for number in range(MOST_KEPT):
        grammars.compiled(Structure("regex", f"b{number}"))
    assert grammars.compiled(first) is not kept


@pytest.mark.parametrize("special", [False, True])
def test_added_tokens_are_no_text_and_stand_where_a_grammar_names_them(special: bool) -> None:
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken("<call>", special=special, normalized=False)])
    grammars = Grammars(tokenizer, len(tokenizer) + 3, {0})
    added = tokenizer.convert_tokens_to_ids("<call>")
    matcher = grammars.compiled(Structure.json_schema({"enum": ["<call>"]})).matcher()
    answer = list[int]()
    while not matcher.completes(answer):
        allowed = (matcher.masked(torch.zeros(len(tokenizer) + 3), answer, ()) == 0.0).nonzero()[:, 0].tolist()
        answer.append(allowed[0])
    assert added not in answer
    assert tokenizer.decode(answer) == '"<call>"'
    named = grammars.compiled(Structure("grammar", f'start: <[{added}]> "a" | "b"')).matcher()
    first, second = tokenizer.encode("ab", add_special_tokens=False)
    for _ in range(2):  # a drafted row is left and reached again
        assert named.allows((), (), added)
        assert named.allows((), (added,), first)
        assert not named.allows((), (added,), second)
        assert named.allows((), (), second)
    anything = grammars.compiled(Structure("regex", "(?s:.*)")).matcher()
    masked = anything.masked(torch.zeros(len(tokenizer) + 3), (), ())
    assert torch.isinf(masked[added])
    assert torch.isinf(masked[len(tokenizer) :]).all()


def test_an_answer_that_has_left_its_structure_is_an_error() -> None:
    matcher = GRAMMARS.compiled(Structure("regex", "aaa")).matcher()
    wrong = LOADED.tokenizer.encode("b", add_special_tokens=False)
    assert matcher.allows((), wrong, wrong[0]) is False
    with pytest.raises(StructureError, match="outside of it"):
        matcher.masked(torch.zeros(VOCABULARY), wrong, ())
