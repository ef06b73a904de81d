from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ssd_runtime.engine.output.text_stream import TextStream, cut_at_stop, stop_condition


def decode(ids: list[int]) -> str:
    """Ids are bytes: characters of several bytes arrive in pieces."""
    return bytes(ids).decode("utf-8", errors="replace")


@given(
    st.text(max_size=60),
    st.lists(st.integers(1, 5), max_size=60),
    st.lists(st.text(min_size=1, max_size=3), max_size=2),
)
def test_pieces_add_up_to_the_text_before_the_stop(text: str, sizes: list[int], stops: list[str]) -> None:
    written: list[str] = []
    stream = TextStream(decode, stops, written.append)
    ids = list(text.encode())
    for size in sizes:
        stream.feed(ids[:size])
        ids = ids[size:]
    stream.feed(ids)
    stream.close()
    expected = cut_at_stop(text, stops)
    assert "".join(written).startswith(expected) if not stops else True
    if not stops:
        assert "".join(written) == text


def test_an_answer_cut_inside_a_character_is_shown_to_its_end() -> None:
    written: list[str] = []
    stream = TextStream(decode, [], written.append)
    for byte in "grün 🎈".encode()[:-1]:
        stream.feed([byte])
    stream.close()
    assert "".join(written) == decode(list("grün 🎈".encode()[:-1]))


def test_nothing_of_a_stop_string_is_shown() -> None:
    written: list[str] = []
    stream = TextStream(decode, ["END"], written.append)
    for byte in b"go E EN x END more":
        stream.feed([byte])
        if stop_condition(decode, ["END"])(stream._ids):  # type: ignore[misc]
            break
    stream.close()
    assert "".join(written) == "go E EN x "


def test_stop_condition() -> None:
    assert stop_condition(decode, []) is None
    condition = stop_condition(decode, ["ab"])
    assert condition is not None
    assert [condition(list(b"xab"[:n])) for n in range(4)] == [False, False, False, True]


@given(st.text(alphabet="abé日😀", max_size=80), st.text(alphabet="abé日😀", min_size=1, max_size=4))
def test_the_stop_condition_sees_what_the_whole_text_shows(text: str, stop: str) -> None:
    """Though it looks at the last tokens alone."""
    condition, ids = stop_condition(decode, [stop]), list(text.encode())
    assert condition is not None
    whole = next((n for n in range(len(ids) + 1) if stop in decode(ids[:n])), None)
    assert next((n for n in range(len(ids) + 1) if condition(ids[:n])), None) == whole
