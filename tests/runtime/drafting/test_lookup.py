"""The n-gram index against a search of the whole sequence, and what lookup makes of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd_artifacts.successors import SuccessorSet
from ssd_runtime.drafting.lookup import Lookup, LookupStats, Node, Ready
from ssd_runtime.drafting.ngrams import LONGEST, NgramIndex
from ssd_runtime.drafting.successors import Successors
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.model.runner import ModelRunner
from ssd_runtime.planning.lookup import LookupPlanner, best_guess, worth_verifying
from ssd_runtime.planning.settings import LookupSettings
from tests.decoding import as_plain
from tests.models import tiny_model
from tests.tables import latency_table

DECODER = Decoder(tiny_model("llama", seed=1))


def searched(tokens: list[int], path: list[int]) -> tuple[int, int]:
    """The longest suffix of both together that ended in `tokens` before, and what followed; (0, -1) without any."""
    whole = tokens + path
    for length in range(min(LONGEST, len(whole)), 0, -1):
        suffix = whole[len(whole) - length :]
        ends = [end for end in range(length, len(tokens) + bool(path)) if tokens[end - length : end] == suffix]
        if ends:
            return length, whole[ends[-1]]
    return 0, -1


words = st.lists(st.integers(0, 3), min_size=1, max_size=60)


@given(words, st.lists(st.integers(0, 3), max_size=12))
def test_the_index_finds_what_a_search_finds(tokens: list[int], path: list[int]) -> None:
    index = NgramIndex()
    for end in range(1, len(tokens) + 1):
        index.extend(tokens[end - 1 : end])
        assert index.after() == searched(tokens[:end], [])
        assert index.after(path) == searched(tokens[:end], path)


@given(words, st.lists(st.lists(st.integers(0, 3), max_size=5), max_size=6))
def test_appended_tokens_count_in_the_next_guesses(prompt: list[int], parts: list[list[int]]) -> None:
    whole = prompt + [token for part in parts for token in part]
    later, at_once = Lookup(LookupStats()), Lookup(LookupStats())
    later.start(prompt)
    at_once.start(whole)
    for part in parts:
        later.append(part)
    assert later.known == at_once.known == len(whole)
    assert later.grow((), 8, 8) == at_once.grow((), 8, 8)


@given(words, st.lists(st.integers(0, 3), max_size=20))
def test_a_long_prompt_is_read_in_parts_and_then_known_like_any_other(prompt: list[int], answer: list[int]) -> None:
    slow, at_once = Lookup(LookupStats(), recycle=False), Lookup(LookupStats(), recycle=False)
    at_once.start([*prompt, *answer])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ssd_runtime.drafting.lookup.MOST_READ", 7)
        slow.start(prompt)
        for token in answer:
            slow.observe((token,))
        assert slow.known == at_once.known
        while slow._unread:
            guesses = slow.grow((), 8, 8)
            assert not (guesses and slow._unread)
    assert slow._index.tokens == at_once._index.tokens
    assert slow._index.after() == at_once._index.after()


@given(words, st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.permutations(range(4))), max_size=20))
def test_a_tree_holds_the_most_probable_guesses_each_behind_its_parent(
    tokens: list[int], seen: list[tuple[int, int, list[int]]]
) -> None:
    stats = LookupStats()
    for before, token, candidates in seen:
        stats.successors.put(before, token, candidates)
    lookup = Lookup(stats)
    lookup.start(tokens)
    tree = lookup.grow((), 24, 8)
    chances = [node.probability for node in tree]
    assert chances == sorted(chances, reverse=True)
    assert len({(node.parent, node.token) for node in tree}) == len(tree), "no token twice in one place"
    for row, node in enumerate(tree, start=1):
        assert node.parent < row
        assert node.depth == (tree[node.parent - 1].depth + 1 if node.parent else 1)
    for depth in range(9):
        draft = ModelRunner(None).finish(Ready(tuple(tree)).drafting(None, depth))  # type: ignore[arg-type]
        paths = draft.paths(9)
        assert len(draft.tokens) == sum(node.depth <= depth for node in tree)
        assert len(set(map(tuple, paths))) == len(paths)
        assert all(len(path) <= depth + 1 for path in paths)


def test_what_pays_follows_the_verification_curve() -> None:
    tree = [Node(1, 0, 0.5, 1), Node(2, 1, 0.3, 2), Node(3, 0, 0.2, 1), Node(4, 2, 0.1, 3)]
    assert worth_verifying(tree, [1.0] * 5, 9.0).tree == tuple(tree), "free"
    assert worth_verifying(tree, [1.0, 2.0, 3.0, 4.0, 5.0], 9.0).tree == (), "as dear as a step"
    assert worth_verifying(tree, [1.0, 1.1, 1.15, 1.9, 2.0], 9.0).tree == tuple(tree[:2])
    assert worth_verifying(tree, [1.0, 1.1, 1.15, 1.9, 2.0], 1.1).tree == tuple(tree[:1]), "no more than may be lost"
    sure = [Node(1, 0, 1.0, 1), Node(2, 1, 1.0, 2), Node(3, 2, 0.9, 3)]
    assert worth_verifying(sure, [1.0, 1.9, 2.5, 3.1], 1.0).tree == tuple(sure[:2]), "what comes back is no loss"
    lookup = Lookup(LookupStats())
    lookup.start([1, 2, 3] * 9)
    assert len(best_guess(lookup, [1.0, 1.4], 9, 9.0).tree) == 1, "one guess is worth less than another step"


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.permutations(range(4))), max_size=40))
def test_what_a_bundle_carries_is_what_was_seen(seen: list[tuple[int, int, list[int]]]) -> None:
    there = Successors()
    for before, token, candidates in seen:
        there.put(before, token, candidates)
    carried = SuccessorSet.of(there.rows())
    assert carried.rows() == there.rows()
    here = Successors(carried.rows())
    for before in range(7):
        for token in range(7):
            assert here.of(before, token) == there.of(before, token)


@pytest.mark.parametrize("recycle", [0, 1])
@pytest.mark.parametrize("ids", [[1, 2, 3] * 9, [5, 6, 7, 8], [4]])
def test_lookup_decodes_as_plain_decoding_does_and_copies_repetitions(ids: list[int], recycle: int) -> None:
    table = latency_table(DECODER.shape.num_layers)
    planner = LookupPlanner(table, LookupSettings(recycle=recycle), LookupStats())
    got = as_plain(DECODER, ids, planner, 90)
    assert got.num_draft_tokens > 0
    assert planner._lookup.known == len(ids) + len(got.token_ids)


def test_the_oldest_successors_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ssd_runtime.drafting.successors.MOST", 2)
    table = Successors([[0, 1, 9], [0, 2, 9], [0, 1, 8], [0, 3, 9]])
    assert table.rows() == [[0, 1, 8], [0, 3, 9]], "what was seen again is not the oldest"
    assert [table.of(5, token)[0] for token in (1, 2, 3)] == [[8], (), [9]]
