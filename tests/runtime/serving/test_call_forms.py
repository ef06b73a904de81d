"""What a model's template writes for calls tells their form; answers in it are read, and may be forced."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import cache, partial
from itertools import pairwise
from time import process_time
from typing import Any

import jsonschema
import pytest
import torch

from ssd_runtime.serving.http.openai.answers.forms import reader_of
from ssd_runtime.serving.http.openai.calls.call_forms import (
    BARE,
    LISTED,
    TAGGED,
    CallForm,
    ElementCall,
    JsonCall,
    NamedCall,
    named_form,
)
from ssd_runtime.serving.http.openai.calls.probe import TOOL, form_of
from ssd_runtime.serving.http.openai.calls.tool_calls import joined
from ssd_runtime.structure.structure import Structure, StructureError
from tests.recorded_calls import CONTROL, FILE
from tests.structures import allows, structured_model

RECORDED: dict[str, list[str]] = json.loads(FILE.read_text())
FORMS: dict[str, type] = {
    "Qwen-Qwen2.5-7B-Instruct": JsonCall,
    "Qwen-Qwen3-0.6B": JsonCall,
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": JsonCall,
    "ibm-granite-granite-4.0": JsonCall,
    "meta-llama-Llama-3.1-8B-Instruct": JsonCall,
    "mistralai-Mistral-Nemo-Instruct-2407": JsonCall,
    "Apriel-1.6-15b-Thinker-fixed": JsonCall,
    "mistralai-Ministral-3-14B-Reasoning-2512": NamedCall,
    "Mistral-Small-3.2-24B-Instruct-2506": NamedCall,
    "deepseek-ai-DeepSeek-V3.1": NamedCall,
    "Qwen3-Coder": ElementCall,
    "Qwen3.5-4B": ElementCall,
    "GLM-4.6": ElementCall,
    "MiniMax-M2": ElementCall,
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": ElementCall,
}
OTHERS = {
    *("Kimi-K3", "LFM2-8B-A1B", "LFM2.5-8B-A1B", "LFM2.5-Instruct", "MiniMax-M3", "NVIDIA-Nemotron-Nano-v2"),
    *("deepseek-ai-DeepSeek-V3.2", "deepseek-ai-DeepSeek-V4", "deepseek-ai-DeepSeek-V4-Flash-0731"),
    *("google-gemma-4-31B-it", "google-gemma-4-31B-it-interleaved", "ibm-granite-granite-3.3-2B-Instruct"),
    "muse-glimmer",
}
"""Templates that write calls in other forms, or only name them."""
SINGLE = {"moonshotai-Kimi-K2", "upstage-Solar-Open-100B"}
"""Templates of which only the first call is read: they number calls, or list them without a list's marks."""
PARAMETERS: dict[str, Any] = TOOL["function"]["parameters"]
TOOLS = [("probe_tool", PARAMETERS)]
CALL = ("probe_tool", {"first_key": "one value", "second_key": 42})
SEVERAL = [
    ("look", {"properties": {"query": {"type": "string", "maxLength": 12}, "pages": {"type": "integer"}}}),
    (
        "mark",
        {
            "$defs": {"colour": {"enum": ["red", "green"]}},
            "properties": {"colour": {"enum": ["red", "green"]}, "at": {"type": "array", "items": {"type": "number"}}},
            "required": ["colour"],
        },
    ),
]


def form_and_control(name: str) -> tuple[CallForm | None, dict[str, int]]:
    written = RECORDED[name]
    control = {token: 900_000 + place for place, token in enumerate(sorted(set(CONTROL.findall("".join(written)))))}
    ends = frozenset(token for text, token in control.items() if "end▁of▁s" in text or text in ("</s>", "<|im_end|>"))
    form = form_of(written.__getitem__, control, ends)
    return form, control


@pytest.fixture
def form(request: pytest.FixtureRequest) -> CallForm | None:
    """The form of a model's calls."""
    return form_and_control(getattr(request, "param", "Qwen3-Coder"))[0]


of_models = partial(pytest.mark.parametrize, "form", indirect=True)


def read(form: CallForm, text: str, cuts: Sequence[int], tools: Any = TOOLS) -> tuple[str, list[tuple[str, Any]]]:
    reader = reader_of(form, tools)
    places = [0, *cuts, len(text)]
    parts = [part for begin, end in pairwise(places) for part in reader.feed(text[begin:end])]
    words, calls = joined([*parts, *reader.close()])
    # `int` raises ValueError for NaN and Infinity, which are no JSON.
    return words, [(call.name, json.loads(call.arguments, parse_constant=int)) for call in calls]


def written(form: CallForm, elements: Sequence[tuple[str, str]]) -> str:
    """A call of `f` with an element for each key and value."""
    before, between, after = form.call.before_key, form.call.after_key, form.call.after_value
    texts = "".join(before + key + between + value + after for key, value in elements)
    return form.opening + "f" + form.call.after_name + texts + form.closing


@pytest.mark.parametrize("name", RECORDED)
def test_what_a_template_writes_is_read_and_may_be_forced(name: str) -> None:
    form, control = form_and_control(name)
    if form is None or name in OTHERS:
        assert name in OTHERS
        return
    assert isinstance(form.call, FORMS.get(name, object))
    shown = form.visible(control)
    for calls, text in enumerate(RECORDED[name][1:], 1):
        if calls > 1 and (form.between is None or name in SINGLE):
            continue
        answer = text[: text.rindex(form.closing) + len(form.closing)] if form.closing else text
        seen = CONTROL.sub("", answer)
        for cuts in ([], range(1, len(seen))):
            words, found = read(shown, seen, cuts)
            assert found == [CALL] * calls
            assert words.strip() in ("", "assistant"), words
        assert CONTROL.sub("", form.opening + form.closing) == shown.opening + shown.closing
        alone = answer.lstrip("\n") if form.closing or name.endswith("Nemo-Instruct-2407") else ""
        if alone and '"id"' not in alone:
            assert allows(form.structure(TOOLS, parallel=True), alone)


@cache
def printable() -> frozenset[int]:
    """The tokens whose texts can be printed."""
    loaded = structured_model()
    tokens = range(loaded.model.config.vocab_size)
    return frozenset(token for token in tokens if loaded.decode([token]).isprintable())


def random_answer(structure: Structure, seed: int) -> str | None:
    """A random answer that a grammar allows; None if it is long."""
    loaded = structured_model()
    matcher = loaded.grammars.compiled(structure).matcher()
    draw, answer = random.Random(seed), list[int]()
    ends = loaded.eos_ids
    while len(answer) < 300:
        allowed = matcher.masked(torch.zeros(loaded.model.config.vocab_size), answer, ()) == 0.0
        tokens = allowed.nonzero()[:, 0].tolist()
        if ends & set(tokens):
            return loaded.decode(answer)
        plain = [token for token in tokens if token in printable()]
        answer.append(draw.choice(plain or tokens))
    return None


@of_models(FORMS)
def test_a_forced_answer_is_read_as_the_calls_that_its_grammar_means(form: CallForm) -> None:
    """Answers that a grammar is walked through at random hold to the tools' schemas, however they are cut."""
    texts = [random_answer(form.structure(SEVERAL, parallel=True), seed) for seed in range(6)]
    assert any(texts)
    for text in filter(None, texts):
        words, found = read(form, text, range(0, len(text), 3), SEVERAL)
        assert not words.strip()
        assert found
        for tool, arguments in found:
            jsonschema.validate(arguments, {"type": "object", **dict(SEVERAL)[tool]})


@pytest.mark.parametrize("name", ["Qwen3-Coder", "GLM-4.6", "MiniMax-M2", "tencent-Hy3"])
def test_calls_without_arguments_are_read_beside_others(name: str) -> None:
    form, control = form_and_control(name)
    call = form.call.after_name
    text = form.opening + "f" + call + form.between + "g" + call + form.closing
    shown, seen = form.visible(control), CONTROL.sub("", text)
    for cuts in ([], range(1, len(seen))):
        assert read(shown, seen, cuts, [("f", None), ("g", None)]) == ("", [("f", {}), ("g", {})])


@of_models(["Qwen3-Coder", "MiniMax-M2"])
@pytest.mark.parametrize("elements", [[], [("x", "1")]])
def test_a_closing_may_lack_words(form: CallForm, elements: list[tuple[str, str]]) -> None:
    """Its last word ends a call without those before it, and the end of the answer one without those after them."""
    whole = written(form, elements)
    for rest in form.closing.split()[-2:]:
        text = whole.removesuffix(form.closing) + f">\n{rest}"
        for cuts in ([], range(1, len(text))):
            words, calls = read(form, f"{text}\nIt rains.", cuts, [("f", None)])
            assert (words.strip(), calls) == ("It rains.", [("f", {key: 1 for key, _ in elements})])
    cut = written(form, [("x", "1"), ("y", "a")]).removesuffix(form.closing)[:-9]
    reader = reader_of(form, [("f", None)])
    assert joined([*reader.feed(cut), *reader.close()])[1][0].arguments == '{"x": 1'


NULLABLE, EITHER = {"type": ["string", "null"]}, {"anyOf": [{"type": "string"}, {"type": "null"}]}
UNTYPED = (None, {"properties": ["x"]}, {"properties": {"y": {"type": "integer"}}, "required": 5})


@of_models(["Qwen3-Coder", "GLM-4.6"])
@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        *((None, text, text) for text in ("NaN", "Infinity", "-Infinity", "[1, NaN]", "{x")),
        *((None, "1e999", float("inf")), ({"type": "string"}, "[42]", "[42]"), ({"type": "integer"}, "42", 42)),
        *((NULLABLE, "12345", "12345"), (NULLABLE, "true", "true"), (EITHER, "1", "1"), (EITHER, "null", None)),
        *(({"type": ["string", "number"]}, text, value) for text, value in (("12", 12), ("x", "x"), ('"12"', "12"))),
        *((wrong, "42", 42) for wrong in ({"oneOf": [{"type": "integer"}]}, {"anyOf": 5}, True, [])),
        *((wrong, "42", 42) for wrong in ({"enum": 5}, {"const": 5}, {"enum": [1, "a"]})),
    ],
)
def test_an_element_has_a_type_that_its_schema_names_or_that_it_spells(
    form: CallForm, schema: Any, text: str, value: Any
) -> None:
    """Numbers that JSON has not are text. Schemas may be no objects, which JSON Schema has, or none at all."""
    for parameters in UNTYPED if schema is None else ({"properties": {"x": schema}},):
        assert read(form, written(form, [("x", text)]), [], [("f", parameters)]) == ("", [("f", {"x": value})])
        form.structure([("f", parameters)], parallel=True)


@of_models(["Qwen3-Coder", "GLM-4.6"])
def test_a_long_value_costs_no_more_than_other_text(form: CallForm) -> None:
    """A second of the processor is many times what it takes; a cost that grew with its square would exceed it."""
    value = "if a < b: c\n" * 4_000 + "."
    text, begun = written(form, [("x", value), ("y", "5")]), process_time()
    found = read(form, text, range(0, len(text), 4), [("f", None)])
    assert process_time() - begun < 1
    assert found == ("", [("f", {"x": value, "y": 5})])


def test_texts_name_the_form_of_templates_that_write_no_call() -> None:
    assert named_form("<tools></tools> … <tool_call>") == TAGGED
    assert named_form("… respond only with <|tool_call|> …") == LISTED
    assert named_form('{"name": function name, "parameters": …}') == BARE
    assert form_of(lambda calls: "", {}, frozenset()) is None
    assert form_of(lambda calls: "nothing of calls" + "QQQ" * (not calls), {}, frozenset()) is None


def test_control_tokens_are_forced_by_their_ids() -> None:
    form, control = form_and_control("mistralai-Ministral-3-14B-Reasoning-2512")
    text = form.structure(TOOLS, parallel=False, tokens=control).text
    assert f"<[{control['[TOOL_CALLS]']}]>" in text
    assert f'"probe_tool" <[{control["[ARGS]"]}]>' in text


WORD_IN_A_VALUE = {"properties": {"x": {"enum": ["a</parameter>b"]}, "y": {"const": {"a": "</parameter>"}}}}


@pytest.mark.parametrize(
    ("parameters", "told"),
    [
        ({"properties": {"day": {"type": "string", "format": "date"}}}, "'day' has a format.*omit it"),
        *(({word: [{"required": ["x"]}]}, f"'f' has a {word}") for word in ("anyOf", "allOf", "oneOf")),
        ({"$ref": "#/$defs/A", "$defs": {"A": {"type": "object"}}}, r"'f' has a \$ref"),
        ({"minProperties": 1}, "'f' has a minProperties"),
        ({"required": ["x"]}, "'f' has a required argument outside of its properties"),
        *(
            ({"properties": {"x": {"items": {"$ref": ref}}}}, "'x' has a reference beyond")
            for ref in ("#", "#/properties/x")
        ),
        *(({"properties": {key: {}}}, "is no name for an argument") for key in ("a<b", "a>b", "a ", "", "a" * 201)),
        *(
            ({"properties": {"x": {"type": "string", bound: length}}}, "'x' has a length that is no whole number")
            for bound, length in (("minLength", "2"), ("maxLength", -1), ("maxLength", 2.5), ("minLength", True))
        ),
    ],
)
def test_promises_that_a_form_cannot_keep_are_refused(form: CallForm, parameters: Any, told: str) -> None:
    with pytest.raises(StructureError, match=told):
        form.structure([("f", parameters)], parallel=False)


@of_models(["Qwen3-Coder", "Qwen-Qwen2.5-7B-Instruct"])
def test_a_schema_that_nothing_matches_is_refused_without_our_grammar(form: CallForm) -> None:
    schema = {"properties": {"x": {"enum": []}}, "required": ["x"]}
    with pytest.raises(StructureError, match="cannot be used") as refused:
        structured_model().grammars.compiled(form.structure([("f", schema)], parallel=False))
    assert "call0" not in str(refused.value)


@of_models(["Qwen3-Coder", "Qwen-Qwen2.5-7B-Instruct"])
def test_a_length_may_be_written_as_json_schema_allows(form: CallForm) -> None:
    schema = {"properties": {"x": {"type": "string", "minLength": 1.0, "maxLength": 2.0}}, "required": ["x"]}
    tools = [("f", {**schema, "additionalProperties": False})]
    words, [(tool, arguments)] = read(form, random_answer(form.structure(tools, False), 1) or "", [], tools)
    assert (words, tool) == ("", "f")
    assert 1 <= len(arguments["x"]) <= 2


def test_a_value_that_has_the_text_after_values_is_read_or_refused(form: CallForm) -> None:
    assert form.structure([("f", WORD_IN_A_VALUE)], parallel=False)
    text = written(form, [("x", "a</parameter>b"), ("y", '{"a": "</parameter>"}')])
    for cuts in ([], range(1, len(text))):
        found = read(form, text, cuts, [("f", WORD_IN_A_VALUE)])
        assert found == ("", [("f", {"x": "a</parameter>b", "y": {"a": "</parameter>"}})])
    without, _ = form_and_control("MiniMax-M2")
    for key, schema in WORD_IN_A_VALUE["properties"].items():
        with pytest.raises(StructureError, match=f"'{key}' has a value with the text after values"):
            without.structure([("f", {"properties": {key: schema}})], parallel=False)


@pytest.mark.parametrize("begin", ["", "\n"])
@pytest.mark.parametrize("end", ["", "\n"])
def test_values_may_lack_the_line_feeds_around_them(form: CallForm, begin: str, end: str) -> None:
    for value in ("", "a b"):
        text = written(form, [("x", "@"), ("y", "@")]).replace("\n@\n", begin + value + end)
        assert read(form, text, range(1, len(text)), [("f", None)]) == ("", [("f", {"x": value, "y": value})])


def test_a_form_has_nothing_of_the_probe_and_is_parallel_only_if_it_is_read_so() -> None:
    assert form_and_control("muse-glimmer")[0] is None
    assert form_and_control("MiniMax-M1")[0].between is None
