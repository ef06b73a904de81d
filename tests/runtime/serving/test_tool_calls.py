"""Calls are found however the text is cut, and text that is no call stays text."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import pairwise, permutations
from time import process_time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd_runtime.serving.http.openai.calls.call_forms import BARE, TAGGED
from ssd_runtime.serving.http.openai.calls.json_reader import COMMON, MARKS, JsonReader
from ssd_runtime.serving.http.openai.calls.tool_calls import MoreArguments, joined
from ssd_runtime.serving.http.openai.reasoning import ReasoningReader

OPEN, CLOSE = "<tool_call>", "</tool_call>"

CALL = f'{OPEN}\n{{"name": "weather", "arguments": {{"city": "Würzburg <b>"}}}}\n{CLOSE}'
BARE_CALL = '{"name": "weather", "parameters": {"city": "Ulm"}}'
PIECES = {
    "tagged": ([CALL, OPEN, CLOSE, "Let me look. ", "<", "<tool", " ", f"{OPEN}not JSON{CLOSE}", "ü"], ()),
    "without tags": ([BARE_CALL, CALL, "[", "]", ", ", " ", "{", "}", "It rains. "], ("weather",)),
    "marks alone": ([*MARKS, *MARKS.values(), "def f(): ", "{", "5", "x"], ()),
    "parts of tags": ([*"<tol_caen>{}/ "], ()),
}
"""Pieces of answers, and the tools that calls without tags may name."""


def pieces(text: str, cuts: Iterable[int]) -> list[str]:
    """A text that is cut at these places."""
    places = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    return [text[begin:end] for begin, end in pairwise(places)]


def parts_of(
    text: str, cuts: Iterable[int], most: int | None = None, bare: tuple[str, ...] = ()
) -> tuple[str, list[tuple[str, str]]]:
    """The text and the calls that come out when the text arrives in pieces."""
    reader = JsonReader(BARE if bare else TAGGED, bare, most)
    words, calls = joined([*(part for piece in pieces(text, cuts) for part in reader.feed(piece)), *reader.close()])
    return words, [(call.name, call.arguments) for call in calls]


@pytest.mark.parametrize("kind", PIECES)
@given(data=st.data())
def test_pieces_make_no_difference_and_text_without_calls_is_unchanged(kind: str, data: st.DataObject) -> None:
    some, bare = PIECES[kind]
    text = "".join(data.draw(st.lists(st.sampled_from(some), max_size=40 if kind == "parts of tags" else 6)))
    whole_words, whole_calls = parts_of(text, [], bare=bare)
    assert {name for name, _ in whole_calls} <= {"weather"}
    for cuts in (data.draw(st.lists(st.integers(0, 200), max_size=8)), range(1, len(text))):
        words, calls = parts_of(text, cuts, bare=bare)
        assert calls == whole_calls
        assert words.split() == whole_words.split()
        if not calls:
            assert words == whole_words == text


def test_blanks_between_words_are_kept_after_a_call_too() -> None:
    text = f"{CALL}\nIt rains in  Ulm.\n\n{CALL}\n"
    words, calls = parts_of(text, range(len(text)))
    assert len(calls) == 2
    assert words == "\nIt rains in  Ulm."
    words, [(name, arguments)] = parts_of(f"Let me look. {CALL} Done.", [5])
    assert (words, name, json.loads(arguments)) == ("Let me look.  Done.", "weather", {"city": "Würzburg <b>"})


def test_an_answer_that_is_a_call_without_tags_is_one_only_where_that_is_the_models_form() -> None:
    call = ("weather", '{"city": "Ulm"}')
    assert parts_of(f" {BARE_CALL}\n", [3, 9], bare=("weather",)) == ("", [call])
    assert parts_of(f"[{BARE_CALL}, {BARE_CALL}]", [1], bare=("weather", "time")) == ("", [call, call])
    assert parts_of(BARE_CALL, [3]) == (BARE_CALL, [])
    assert parts_of(f"{BARE_CALL} rain", [2], bare=("weather",)) == ("rain", [call])
    for text in (BARE_CALL, "{}", "[]", "[5]", f"It is {BARE_CALL}", '{"name": "weather"}, {'):
        assert parts_of(text, [2], bare=("time",) if text == BARE_CALL else ("weather",)) == (text, [])
    assert parts_of(f"{OPEN}[{BARE_CALL}, {BARE_CALL}]{CLOSE}", []) == ("", [call, call])


def test_a_call_may_end_with_the_answer() -> None:
    assert len(parts_of(CALL.removesuffix(CLOSE), [])[1]) == 1
    cut = CALL[:30]
    assert parts_of(cut, []) == (cut, [])


def test_calls_beyond_the_limit_are_dropped() -> None:
    assert len(parts_of(CALL * 3, [])[1]) == 3
    assert len(parts_of(CALL * 3, [], most=1)[1]) == 1


FORMS = {
    "hermes": (f'{OPEN}\n{{"name": "weather", "arguments": {{"city": "Ulm"}}}}\n{CLOSE}', ()),
    "qwen, twice": (f'{OPEN}\n{{"name": "weather", "arguments": {{"city": "Ulm"}}}}\n{CLOSE}\n' * 2, ()),
    "llama 3": ('{"name": "weather", "parameters": {"city": "Ulm"}}', ("weather",)),
    "llama 3, python tag": ('<|python_tag|>{"name": "weather", "parameters": {"city": "Ulm"}}', ()),
    "mistral": ('[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Ulm"}}]', ()),
    "mistral, its mark hidden": (' [{"name": "weather", "arguments": {"city": "Ulm"}}]', ("weather",)),
    "granite": ('<tool_call>[{"name": "weather", "arguments": {"city": "Ulm"}}]</tool_call>', ()),
    "granite 3.1": ('<|tool_call|>[{"name": "weather", "arguments": {"city": "Ulm"}}]', ()),
    "phi 4": ('<|tool_call|>[{"name": "weather", "arguments": {"city": "Ulm"}}]<|/tool_call|>', ()),
    "phi 4, functools": ('functools[{"name": "weather", "arguments": {"city": "Ulm"}}]', ("weather",)),
    "gemma 3": ('```json\n{"name": "weather", "parameters": {"city": "Ulm"}}\n```', ("weather",)),
    "other order": (f'{OPEN}{{"arguments": {{"city": "Ulm"}}, "name": "weather"}}{CLOSE}', ()),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_forms_of_models_are_read_whole_and_letter_by_letter(form: str) -> None:
    text, bare = FORMS[form]
    calls = [("weather", '{"city": "Ulm"}')] * (1 + ("twice" in form))
    for cuts in ([], range(len(text))):
        words, found = parts_of(text, cuts, bare=bare)
        assert (words.strip(), found) == ("", calls)


BLOCKS = ('{"name": "my-app", "version": "1"}', '{"name": "my-app", "arguments": {}}', '[{"name": "a"}, {"name": "b"}]')


@pytest.mark.parametrize(
    ("text", "bare"),
    [
        *((f"Here:\n```json\n{block}\n```\nThat is it.", ("weather",)) for block in BLOCKS),
        (f'{OPEN}{{"arguments": {{}}, "name": "\\ud83d"}}{CLOSE}', ()),
        (f'{OPEN}{{"name": "get\nweather", "arguments": {{"a": 1}}}}{CLOSE}', ()),
    ],
)
def test_json_that_names_no_tool_stays_text(text: str, bare: tuple[str, ...]) -> None:
    for cuts in ([], range(len(text))):
        assert parts_of(text, cuts, bare=bare) == (text, [])


@pytest.mark.parametrize("mark", COMMON)
@pytest.mark.parametrize(
    "answer",
    [
        "[1] Smith says that it rains.",
        '[\n  "Ulm"\n]',
        '{"x": 1, "y": 2}',
        '[{"id": 1, "title": "Rain"}]',
        '{"name": "Smith", "age": 40}',
        '{"name": {"first": "Ann"}}',
        '{"type": "object", "properties": {}}',
    ],
)
def test_json_that_is_no_call_is_told_as_it_comes(mark: str, answer: str) -> None:
    text = f"{mark}{answer}{' It rains in Ulm.' * 9}"
    reader, told = JsonReader(BARE, ["weather"]), ""
    for fed, letter in enumerate(text, 1):
        told += joined(reader.feed(letter))[0]
        assert len(told) >= fed - 50
    assert told + joined(reader.close())[0] == text


@pytest.mark.parametrize("mark", [*COMMON, OPEN])
def test_members_of_a_call_come_in_any_order(mark: str) -> None:
    members = ('"name": "weather"', '"parameters": {"city": "Ulm"}', '"type": "function"', '"id": "a1"')
    for some in (2, 3, 4):
        for order in filter({*members[:2]}.issubset, permutations(members, some)):
            for call in (f"{{{', '.join(order)}}}", f"[ {{ {' , '.join(order)} }} ]"):
                text = f"{mark}{call}{MARKS.get(mark, '')}"
                for cuts in ([], range(len(text))):
                    assert parts_of(text, cuts, bare=("weather",))[1] == [("weather", '{"city": "Ulm"}')], text


@pytest.mark.parametrize(
    ("begin", "piece", "end", "calls"),
    [
        *((CALL[:place], " " * 64_000, CALL[place:], 1) for place in (11, 13)),
        *((CALL[:place], "\n", CALL[place:], 1) for place in (11, 13)),
        ('{"type": ', "1111", "", 0),
        *((begin, "aaaa", "", 0) for begin in ('{"type": "', '{"id": "', '{"name": "', '{"')),
        ("{", '"type": "a", ', "", 0),
        (OPEN + '{"name": "weather", "arguments": {}, "id": "', "aaaa", "", 1),
    ],
)
def test_blanks_and_json_that_never_decides_cost_no_more_than_other_text(
    begin: str, piece: str, end: str, calls: int
) -> None:
    """A second of the processor is a few times what it takes; with the square of the length it would not do."""
    fed = [begin, *[piece] * (1 if len(piece) > 99 else 8_000), end]
    reader, begun = JsonReader() if end else JsonReader(BARE, ["weather"]), process_time()
    parts = [part for text in fed for part in reader.feed(text)]
    assert process_time() - begun < 1
    text, found = joined([*parts, *reader.close()])
    assert len(found) == calls
    assert calls or text == "".join(fed)


def test_half_a_character_in_a_call_is_escaped() -> None:
    words, [(name, arguments)] = parts_of(f'{OPEN}{{"arguments": {{"city": "\\ud83d"}}, "name": "weather"}}{CLOSE}', [])
    assert (words, name) == ("", "weather")
    assert json.loads(arguments.encode()) == {"city": "\ud83d"}


def test_arguments_come_as_they_are_written() -> None:
    reader = JsonReader()
    parts = [part for letter in CALL for part in reader.feed(letter)]
    assert sum(isinstance(part, MoreArguments) for part in parts) > 10
    cut = JsonReader()
    assert joined(cut.feed(CALL[: CALL.index("rzburg")]))[1][0].arguments == '{"city": "Wü'


@given(cuts=st.lists(st.integers(0, 60), max_size=8), opened=st.booleans(), blank=st.sampled_from(["", "\n", " \n\n"]))
def test_thoughts_are_split_from_answers_however_they_are_cut(cuts: list[int], opened: bool, blank: str) -> None:
    for thoughts, answer in (("a < b </thin", "It is.\n"), ("", "It is."), ("a\n\nb", "")):
        text = f"{'' if opened else '<think>'}{blank}{thoughts}{blank}</think>{blank}{answer}"
        reader = ReasoningReader(opened)
        parts = [*map(reader.feed, pieces(text, cuts)), reader.close()]
        assert ("".join(one for one, _ in parts), "".join(two for _, two in parts)) == (thoughts, answer)
    plain = ReasoningReader(False)
    assert plain.feed(" <b>") == ("", " <b>")
    assert (plain.close(), ReasoningReader(True).close()) == (("", ""), ("", ""))
