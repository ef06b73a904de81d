"""Calls are found however the text is cut, and text that is no call stays text."""

from __future__ import annotations

import json
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from ssd_runtime.serving.http.openai.tool_calls import CLOSE, OPEN, ParsedCall, ToolCallReader

CALL = f'{OPEN}\n{{"name": "weather", "arguments": {{"city": "Würzburg <b>"}}}}\n{CLOSE}'
TEXTS = st.lists(
    st.sampled_from([CALL, OPEN, CLOSE, "Let me look. ", "<", "<tool", " ", f"{OPEN}not JSON{CLOSE}", "ü"]), max_size=6
).map("".join)


BARE = '{"name": "weather", "parameters": {"city": "Ulm"}}'
BARE_TEXTS = st.lists(st.sampled_from([BARE, CALL, "[", "]", ", ", " ", "{", "}", "It rains. "]), max_size=5).map(
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


@given(text=TEXTS, cuts=st.lists(st.integers(0, 200), max_size=8))
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
    text = f"{CALL}\nIt rains in  Ulm.\n\n{CALL}\n"
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
    words, [(name, arguments)] = parts_of(before + CALL + after, [5])
    assert words == before + after
    assert (name, json.loads(arguments)) == ("weather", {"city": "Würzburg <b>"})


@given(text=st.text(alphabet="<tol_caen>{}/ ", max_size=40))
def test_text_without_calls_is_unchanged(text: str) -> None:
    assert parts_of(text, [3, 7]) == (text, [])


def test_a_call_may_end_with_the_answer() -> None:
    assert len(parts_of(CALL.removesuffix(CLOSE), [])[1]) == 1
    cut = CALL[:30]
    assert parts_of(cut, []) == (cut, [])


def test_calls_beyond_the_limit_are_dropped() -> None:
    assert len(parts_of(CALL * 3, [])[1]) == 3
    assert len(parts_of(CALL * 3, [], most=1)[1]) == 1
