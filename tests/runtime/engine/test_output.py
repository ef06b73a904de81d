"""A request's output: text in pieces, cycles with their budget, seconds without others' work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ssd_runtime.engine.observed import Observation
from ssd_runtime.engine.output.text_stream import TextStream, cut_at_stop, stop_condition
from ssd_runtime.loading.loaded_model import LoadedModel
from ssd_runtime.planning.auto.budget import Budget
from ssd_runtime.planning.plan import PLAIN, Cycle, PlainPlanner, Planner
from tests.models import tiny_model
from tests.toy_tokenizers import KINDS as TOKENIZERS


@dataclass(frozen=True)
class Kind:
    """A tokenizer's two directions: from text to ids, and from ids to text."""

    ids: Callable[[str], list[int]]
    text: Callable[[list[int]], str]


def bytes_of(text: str) -> list[int]:
    return list(text.encode())


def text_of(ids: list[int]) -> str:
    """Ids are bytes: characters of several bytes arrive in pieces."""
    return bytes(ids).decode("utf-8", errors="replace")


def kind_of(tokenizer: PreTrainedTokenizerBase) -> Kind:
    loaded = LoadedModel.of(tiny_model("llama"), tokenizer)
    return Kind(lambda text: list(tokenizer.encode(text, add_special_tokens=False)), loaded.decode)


KINDS = {
    "bytes": Kind(bytes_of, text_of),
    **{name: kind_of(TOKENIZERS[name]()) for name in ("byte_level", "llama", "gemma")},
}
LETTERS = "abE é日龘鰐😀"
each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


@each_kind
@given(text=st.text(LETTERS, max_size=40), sizes=st.lists(st.integers(1, 5), max_size=60), cut=st.integers(0, 9))
@example("日龘鰐", [1] * 9, 1)
@example("日龘鰐龘鰐", [3] * 5, 0)
def test_pieces_add_up_to_the_text(kind: Kind, text: str, sizes: list[int], cut: int) -> None:
    """Wherever the pieces end, and though the last character may lack bytes."""
    written: list[str] = []
    stream = TextStream(kind.text, [], written.append)
    ids = kind.ids(text)
    ids = rest = ids[: max(0, len(ids) - cut)]
    for size in sizes:
        stream.feed(rest[:size])
        rest = rest[size:]
    stream.feed(rest)
    stream.close()
    assert "".join(written) == kind.text(ids)
    assert text.startswith(kind.text(ids).rstrip("\ufffd"))


@each_kind
@given(data=st.data(), sizes=st.lists(st.integers(1, 5), max_size=20))
def test_pieces_of_broken_characters_add_up_to_one_text(kind: Kind, data: st.DataObject, sizes: list[int]) -> None:
    """Whatever the number of tokens that come at once."""
    ids = data.draw(st.permutations(kind.ids(data.draw(st.text(LETTERS, max_size=20)))))
    texts = list[str]()
    for ends in (range(1, len(ids) + 1), [*accumulate(sizes), len(ids)]):
        written: list[str] = []
        stream, begin = TextStream(kind.text, [], written.append), 0
        for end in ends:
            stream.feed(ids[begin:end])
            begin = end
        stream.close()
        texts.append("".join(written))
    assert texts[0] == texts[1]


@each_kind
@given(
    text=st.text(LETTERS, max_size=40), stops=st.lists(st.text(LETTERS, min_size=1, max_size=3), min_size=1, max_size=2)
)
@example("go E EN x END more", ["END"])
@example("😀😀😀", ["E"])
@example("😀" * 12, ["E"])
def test_an_answer_ends_before_its_first_stop_text(kind: Kind, text: str, stops: list[str]) -> None:
    """As soon as the whole text shows it, though the test looks at the last tokens alone."""
    written: list[str] = []
    stream, has_ended = TextStream(kind.text, stops, written.append), stop_condition(kind.text, stops)
    assert has_ended is not None
    ids = list[int]()
    for token in kind.ids(text):
        stream.feed([token])
        ids.append(token)
        whole = kind.text(ids)
        assert has_ended(ids) == any(stop in whole for stop in stops)
        if has_ended(ids):
            break
    stream.close()
    assert "".join(written) == cut_at_stop(kind.text(ids), stops)


def test_of_several_stop_texts_the_first_in_the_text_counts() -> None:
    assert cut_at_stop("xab", ["b", "ab"]) == "x"


@each_kind
def test_bytes_that_never_make_a_character_are_shown_soon(kind: Kind) -> None:
    """Else each of them would be decoded again with every token that follows."""
    written: list[str] = []
    stream = TextStream(kind.text, [], written.append)
    first = kind.ids("é日")[-2]
    for number in range(1, 40):
        stream.feed([first])
        assert len("".join(written)) >= len(kind.text([first] * number)) - 3


def cycle(tokens: int) -> Cycle:
    return Cycle(
        plan=PLAIN,
        context=9,
        drafted=4,
        accepted=tokens - 1,
        tokens=[1] * tokens,
        verified=5,
        draft_seconds=0.0,
        verify_seconds=0.1,
    )


@dataclass
class Spending(Planner):
    """Pays three plain steps per cycle."""

    budget: Budget = field(default_factory=Budget)

    def observe(self, cycle: Cycle, states: list[Tensor] | None) -> None:
        self.budget.update(len(cycle.tokens), cost=3.0)


def test_cycles_are_reported_with_the_budget_they_took() -> None:
    planner = Spending()
    seen = [Observation(cycle(1), before := planner.budget.credit)]
    for tokens in (2, 5):
        planner.observe(cycle(tokens), None)
        seen.append(Observation.of(cycle(tokens), planner, seen[-1].credit))
    assert seen[1].credit is not None
    assert seen[1].spent == before - seen[1].credit > 0
    assert seen[2].credit == planner.budget.credit
    assert seen[2].spent == 0.0, "a cycle that gains takes nothing"
    assert Observation.of(cycle(1), PlainPlanner(), None) == Observation(cycle(1))
