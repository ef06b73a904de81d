"""Memory for keys and values: whatever moves, grows, slides or is shared, each slot holds what was written to it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd_profiles.mask import SubLayerPlan
from ssd_runtime.engine.loop import decode, generate
from ssd_runtime.engine.output.output import Limits
from ssd_runtime.model.cache.kv_cache import KVCache
from ssd_runtime.model.cache.kv_pool import KVLayout, KVPool, PoolFull
from ssd_runtime.model.cache.slot_ranges import SlotRanges
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.planning.plan import ConstantPlanner, PlainPlanner, Plan
from ssd_runtime.sequence.prefix_cache import PrefixCache
from ssd_runtime.sequence.session import Session
from tests.decoding import assert_same, plainly
from tests.models import tiny_model
from tests.mtp import with_mtp
from tests.small_memory import BLOCK, small_memory

WINDOW = 5


def layout(windows: list[int | None]) -> KVLayout:
    return KVLayout([torch.device("cpu")] * len(windows), windows, [(2, 4)] * len(windows), torch.float32, 600)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 20)), max_size=40))
def test_ranges_never_overlap_and_come_back(asked: list[tuple[bool, int]]) -> None:
    ranges, taken = SlotRanges(60), list[tuple[int, int]]()
    for takes, count in asked:
        if takes:
            begin = ranges.take(count)
            assert (begin is None) == (ranges.longest < count) or begin is not None
            if begin is not None:
                assert all(begin + count <= other or end <= begin for other, end in taken)
                taken.append((begin, begin + count))
        elif taken:
            ranges.give_back(*taken.pop(count % len(taken)))
        assert ranges.free == 60 - sum(end - begin for begin, end in taken)
    for each in taken:
        ranges.give_back(*each)
    assert ranges.take(60) == 0


class Copy:
    """Expected contents of one sequence's cache: a number for every position, in every layer."""

    def __init__(self, pool: KVPool) -> None:
        self.cache, self.values = KVCache(pool), list[float]()

    def append(self, values: list[float]) -> None:
        start = len(self.values)
        self.cache.reserve(start + len(values), start)
        for layer in range(len(self.cache.pool.storage)):
            new = torch.tensor(values)[:, None, None].expand(-1, 4, 4) + layer
            self.cache.write(layer, start, new)
        self.values += values

    def check(self) -> None:
        for layer, window in enumerate(self.cache.pool.layout.windows):
            begin = max(0, len(self.values) - window + 1) if window else 0
            keys, values = self.cache.read(layer, begin, len(self.values))
            expected = torch.tensor(self.values[begin:]) + layer
            for got in (keys, values):
                assert torch.equal(got, expected[None, None, :, None].expand(1, 2, -1, 4)), (layer, begin)


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4), st.integers(1, 24)), max_size=60),
    st.booleans(),
    st.sampled_from([[None], [WINDOW], [WINDOW, None], [None, 9, WINDOW]]),
)
def test_every_sequence_of_a_pool_keeps_its_own(
    actions: list[tuple[int, int, int]], fixed: bool, windows: list[int | None]
) -> None:
    with small_memory():
        each = layout(windows)
        pool = KVPool(each, 400 * each.bytes_per_slot if fixed else None, 3)
        pointers = [storage.data_ptr() for storage in pool.storage]
        sequences = [Copy(pool) for _ in range(4)]
        number = 0.0
        for which, action, count in actions:
            one = sequences[which]
            try:
                if action < 2:
                    one.append([number := number + 1 for _ in range(count)])
                elif action == 2:
                    one.cache.trim(len(one.values))
                elif action == 3:
                    one.cache.release()
                    sequences[which] = Copy(pool)
                elif one.values:
                    other = Copy(pool)
                    other.cache.copy_from(one.cache, len(one.values))
                    other.values = list(one.values)
                    other.check()
                    sequences[(which + 1) % 4].cache.release()
                    sequences[(which + 1) % 4] = other
            except PoolFull:
                assert fixed
                one.cache.release()
                sequences[which] = Copy(pool)
            for sequence in sequences:
                sequence.check()
        if fixed:
            assert [storage.data_ptr() for storage in pool.storage] == pointers
        for sequence in sequences:
            sequence.cache.release()
        assert pool.used_bytes == 0


def test_slots_of_a_cache_that_nobody_holds_come_back() -> None:
    each = layout([None])
    pool = KVPool(each, 200 * each.bytes_per_slot)
    cache: KVCache | None = KVCache(pool)
    cache.reserve(100)
    assert pool.used_bytes
    cache = None
    gc.collect()
    assert not pool.used_bytes


def test_a_marked_position_can_be_returned_to() -> None:
    with small_memory():
        sequence = Copy(KVPool(layout([WINDOW, 9, None])))
        sequence.append([float(i) for i in range(20)])
        assert sequence.cache.resumable(20)
        sequence.cache.mark(20)
        for _ in range(10):
            sequence.append([-1.0] * 20)
        assert sequence.cache.resumable(20)
        assert not sequence.cache.resumable(40), "its window is gone, and nobody had marked it"
        sequence.cache.rewind(20)
        sequence.values = sequence.values[:20]
        sequence.check()
        sequence.append([7.0] * 30)
        sequence.check()


PROMPT = [1 + 7 * i % 90 for i in range(60)]
FAMILIES = ["llama", "gemma3", "mistral-sliding", "phi3-longrope"]


@contextmanager
def prefixed(variant: str = "llama", slots: int = 1600, most: int = 16) -> Iterator[tuple[Decoder, PrefixCache]]:
    """A decoder, and a cache of prefixes in a pool of so many slots."""
    decoder = Decoder(tiny_model(variant, seed=4, max_position_embeddings=256))
    with small_memory():
        yield decoder, PrefixCache(decoder.new_pool(slots * decoder.kv_layout.bytes_per_slot, most))


@pytest.mark.parametrize("variant", ["gemma3", "mistral-sliding"])
def test_decoding_with_sliding_caches_equals_decoding_with_whole_ones(variant: str) -> None:
    decoder, limits = Decoder(tiny_model(variant, seed=4, max_position_embeddings=512)), Limits(100)
    whole = plainly(decoder, PROMPT, 100)
    mask = SubLayerPlan.of(4, {1, 4})
    with small_memory():
        for plan in (Plan("plain"), Plan.masked("test", mask, 4, branching=((1.0, 3),))):
            session = Session(decoder)
            got = generate(session, PROMPT, ConstantPlanner(plan), limits).token_ids
            assert_same(decoder, PROMPT, whole, got)
            sliding = [
                lease
                for lease, group in zip(session.cache.leases, session.cache.pool.groups, strict=True)
                if group.window
            ]
            assert sliding
            assert all(lease.first > 0 for lease in sliding)
        prompt = session.prefill(PROMPT, new_tokens=100)
        for _ in range(2):  # the second time the window before the prompt's end has to come back
            assert_same(decoder, PROMPT, whole, decode(session, prompt, ConstantPlanner(plan), limits).token_ids)


@pytest.mark.parametrize("variant", FAMILIES)
def test_what_was_never_written_is_never_read(variant: str) -> None:
    decoder = Decoder(tiny_model(variant, seed=4))
    expected = plainly(decoder, PROMPT[:20], 40)
    with small_memory():
        pool = decoder.new_pool(300 * decoder.kv_layout.bytes_per_slot, 2)
        for storage in pool.storage:
            storage.fill_(float("nan"))
        prefixes = PrefixCache(pool)
        for plan in (Plan("plain"), Plan.masked("test", SubLayerPlan.of(4, {2, 5}), 5, branching=((1.0, 4),))):
            session = Session(decoder, prefixes=prefixes)
            assert generate(session, PROMPT[:20], ConstantPlanner(plan), Limits(40)).token_ids == expected


@pytest.mark.parametrize("variant", FAMILIES)
def test_a_prompt_that_begins_like_an_earlier_sequence_is_not_run_again(variant: str) -> None:
    """The answer and the routing features are what they are without."""
    with prefixed(variant) as (decoder, prefixes):
        # Beyond longrope's switch: the short prompt in between is on the other side of it, and reuses nothing.
        first, limits = PROMPT[:50] if decoder.rope_switch else PROMPT[:30], Limits(21)
        answer = generate(Session(decoder, prefixes=prefixes), first, PlainPlanner(), limits).token_ids
        for name, ids, shared in (
            ("next turn", [*first, *answer, 5, 6, 7, 8, 9], len(first) + 16),
            ("system prompt", [*first[:18], 3, 3, 3, 3], 0 if decoder.rope_switch else 16),
            ("same", first, len(first) - 4),
        ):
            prompt = Session(decoder).prefill(ids)
            session = Session(decoder, prefixes=prefixes)
            again = session.prefill(ids, new_tokens=21)
            assert session.reused >= shared, name
            assert session.reused or not shared
            torch.testing.assert_close(again.mean, prompt.mean, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(again.last, prompt.last, atol=1e-3, rtol=1e-3)
            got = decode(session, again, PlainPlanner(), limits).token_ids
            assert_same(decoder, ids, plainly(decoder, ids, 21), got)


def test_prefixes_of_other_weights_are_not_used() -> None:
    with prefixed() as (decoder, prefixes):
        for changed, reused in ((False, False), (False, True), (True, False), (False, True)):
            if changed:
                with torch.no_grad():
                    decoder.model.model.embed_tokens.weight[3:9] *= 1.5
            session = Session(decoder, prefixes=prefixes)
            session.prefill(PROMPT[:30])
            assert bool(session.reused) == reused
            session.close()
        assert len(prefixes) == 1


def test_a_sequence_of_older_weights_that_ends_late_pushes_no_prefix_out() -> None:
    with prefixed() as (decoder, prefixes):
        older, newer, again = (Session(decoder, prefixes=prefixes) for _ in range(3))
        older.prefill(PROMPT[:30])
        with torch.no_grad():
            decoder.model.model.embed_tokens.weight[3:9] *= 1.5
        newer.prefill(PROMPT[:30])
        newer.close()
        older.close()
        again.prefill(PROMPT[:30])
        assert again.reused


def test_a_sequence_whose_keys_were_released_is_no_prefix() -> None:
    with prefixed() as (decoder, prefixes):
        session = Session(decoder, prefixes=prefixes)
        session.prefill(PROMPT[:30])
        session.release()
        session.close()
        assert len(prefixes) == 0


def test_prefixes_keep_within_their_share_and_give_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ssd_runtime.sequence.prefix_cache.SHARE", 0.5)
    with prefixed(slots=300, most=4) as (decoder, prefixes):
        pool = prefixes.pool
        for token in range(1, 9):
            session = Session(decoder, prefixes=prefixes)
            session.prefill([token] * 40)
            session.close()
            assert prefixes.bytes <= pool.bytes / 2
        assert len(prefixes) == 3
        session = Session(decoder, prefixes=prefixes)
        session.prefill([9] * 152)
        session.close()
        assert len(prefixes) == 3, "one that is larger than the share pushes no other out"
        assert prefixes.make_room(230)
        assert len(prefixes) < 3
        held = KVCache(pool)
        held.reserve(100)
        left = len(prefixes)
        assert left
        assert not prefixes.make_room(230), "there is no room even without any prefix, so none is dropped"
        assert len(prefixes) == left
        while prefixes.forget_oldest():
            pass
        assert prefixes.bytes == 0


def test_states_of_an_answer_count_as_its_keys_do() -> None:
    with prefixed(slots=300, most=4) as (decoder, prefixes):
        for token in range(1, 5):
            generate(Session(decoder, prefixes=prefixes), [token] * 4, PlainPlanner(), Limits(45))
        states = sum(each.states.bytes for each in prefixes._prefixes)
        assert 0 < states + prefixes.bytes <= prefixes.pool.bytes / 2


@pytest.mark.parametrize("has_mtp", [False, True])
@torch.inference_mode()
def test_states_of_a_long_answer_are_few_tensors(has_mtp: bool) -> None:
    """An MTP layer that is not asked shares them."""
    decoder = Decoder(with_mtp("qwen3.5", seed=2) if has_mtp else tiny_model("llama", seed=4))
    with small_memory():
        session = Session(decoder, prefixes=PrefixCache(decoder.new_pool(1600 * decoder.kv_layout.bytes_per_slot, 4)))
        session.prefill([1] * BLOCK)
        expected = list[torch.Tensor]()
        for token in range(50):
            states = session.forward([token])
            session.commit([token], states=states)
            expected.append(states)
        held = session._states
        assert len(held._open) <= 50 / BLOCK + BLOCK
        assert torch.equal(torch.cat(held._open), torch.cat(expected))
        if held.mtp is not None:
            places = {each.data_ptr() for each in held._open}
            assert sum(each.data_ptr() not in places for each in held.mtp._states) <= BLOCK, "those beside the prompt's"
