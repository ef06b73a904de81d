"""The n-gram index against a search of the whole sequence, and what lookup makes of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd_runtime.decoder import Decoder
from ssd_runtime.drafting.lookup import Lookup
from ssd_runtime.generate import Limits, generate
from ssd_runtime.ngrams import LONGEST, NgramIndex
from ssd_runtime.planning.lookup import LookupPlanner
from ssd_runtime.planning.plan import PlainPlanner
from ssd_runtime.planning.settings import LookupSettings
from ssd_runtime.session import Session
from tests.models import tiny_model
from tests.tables import latency_table

DECODER = Decoder(tiny_model("llama", seed=1))


def searched(tokens: list[int]) -> tuple[int, int]:
    """The longest suffix that stood before, and where its latest earlier place ended; (0, 0) without any."""
    for length in range(min(LONGEST, len(tokens) - 1), 0, -1):
        suffix = tokens[len(tokens) - length :]
        ends = [end for end in range(length, len(tokens)) if tokens[end - length : end] == suffix]
        if ends:
            return length, ends[-1]
    return 0, 0


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 12))
def test_the_index_finds_what_a_search_finds(tokens: list[int], count: int) -> None:
    index = NgramIndex()
    for end in range(1, len(tokens) + 1):
        index.extend(tokens[end - 1 : end])
        length, begin = searched(tokens[:end])
        assert index.match == length
        copied = list(tokens[:end])
        for i in range(count if length else 0):
            copied.append(copied[begin + i])
        assert index.continuation(count) == copied[end:]


def test_copies_grow_where_they_hold_and_stop_where_they_fail() -> None:
    table = latency_table(DECODER.shape.num_layers)
    session = Session(DECODER)
    session.prefill([1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2])
    holding, failing = Lookup(table), Lookup(table)
    first = holding.draft(session, 3, 16).tokens
    failing.draft(session, 3, 16)
    assert first == [4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5, 6, 7, 8, 9, 1][: len(first)]
    for _ in range(60):
        holding.observe(8, 8)
        failing.observe(8, 0)
    assert len(holding.draft(session, 3, 16).tokens) == 16
    assert len(failing.draft(session, 3, 16).tokens) <= 1


@pytest.mark.parametrize("ids", [[1, 2, 3] * 9, [5, 6, 7, 8], [4]])
def test_lookup_decodes_as_plain_decoding_does_and_copies_repetitions(ids: list[int]) -> None:
    planner = LookupPlanner(latency_table(DECODER.shape.num_layers), LookupSettings())
    got = generate(Session(DECODER), ids, planner, Limits(90))
    assert got.token_ids == generate(Session(DECODER), ids, PlainPlanner(), Limits(90)).token_ids
    assert got.num_draft_tokens > 0
