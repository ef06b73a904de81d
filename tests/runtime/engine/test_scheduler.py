"""Whatever decodes beside it, a sequence's output is what it is alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from bench.fixtures.planted import plant
from ssd_profiles.errors import UserError
from ssd_profiles.latency import LatencyTable
from ssd_profiles.mask import SubLayerPlan
from ssd_runtime.drafting.early_exit import EarlyExit
from ssd_runtime.drafting.mtp import MtpChain
from ssd_runtime.engine.job import Job
from ssd_runtime.engine.loop import generate, generating
from ssd_runtime.engine.output.divergence import Kind, compare
from ssd_runtime.engine.output.generation import Generation
from ssd_runtime.engine.output.output import Limits
from ssd_runtime.engine.scheduler import Scheduler
from ssd_runtime.model.batch import Batch
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.model.exit_heads import ExitHeads
from ssd_runtime.planning.auto.auto import AutoPlanner
from ssd_runtime.planning.auto.stream import Stream
from ssd_runtime.planning.cost import Entry
from ssd_runtime.planning.frontier import Frontier
from ssd_runtime.planning.plan import ConstantPlanner, PlainPlanner, Plan, Planner
from ssd_runtime.sampling.params import GREEDY, SamplingParams
from ssd_runtime.sequence.session import Session
from tests.gguf_files import quantised_pair
from tests.models import HYBRIDS, IN_BOTH, SHARING, tiny_model
from tests.mtp import with_mtp
from tests.small_memory import small_memory
from tests.streams import stream_by_the_table
from tests.tables import latency_table, profile

FLAT, STEEP = latency_table(4, per_token=1e-7), latency_table(4, per_token=1e-3)
"""Rows that cost nothing, and rows that each cost as much as a plain step's."""


def planners(decoder: Decoder, stream: Stream | None = None) -> list[Planner]:
    mask = SubLayerPlan.of(4, {2, 5})
    masks = {"mix": Frontier((Entry("mask", mask, profile(0.95)),))}
    stream, has_mtp = stream or stream_by_the_table(), decoder.mtp is not None
    return [
        PlainPlanner(),
        ConstantPlanner(Plan.masked("chain", mask, 4)),
        ConstantPlanner(Plan.masked("tree", SubLayerPlan.of(4, {1, 4}), 3, branching=((1.0, 3),))),
        ConstantPlanner(Plan("exit", EarlyExit(ExitHeads(decoder), (1, 2, 3), 0.1), 4)),
        ConstantPlanner(Plan("mtp", MtpChain(branching=((0.5, 2),)), 3) if has_mtp else Plan.masked("same", mask, 2)),
        AutoPlanner(masks, {}, ExitHeads(decoder), None, FLAT, stream, mtp=has_mtp),
    ]


def assert_as_alone(decoder: Decoder, params: SamplingParams, ids: list[int], limits: Limits, got: list[int]) -> None:
    """A first difference is no more than what this model's rows differ by anyway, when they are run at once."""
    alone = generate(Session(decoder, params), ids, PlainPlanner(), limits).token_ids
    assert len(got) == len(alone)
    difference = compare(Session(decoder, params), ids, alone, got, rounding(decoder))
    assert difference.kind is not Kind.ERROR, difference


@torch.inference_mode()
def rounding(decoder: Decoder) -> float:
    """The most that logits differ by between one row at a time and all rows at once, and half of that again."""
    # Packed weights magnify what longer forwards round otherwise, and that with more keys.
    ids, session = [1 + 7 * i % 90 for i in range(24 if decoder.rounding == decoder.dtype else 80)], Session(decoder)
    at_once, each = decoder.logits(Session(decoder).forward(ids)), list[torch.Tensor]()
    for token in ids:
        each.append(decoder.logits(session.forward([token])))
        session.commit([token])
    return 1.5 * float((torch.cat(each) - at_once).abs().max())


@pytest.mark.parametrize(("variant", "dtype"), IN_BOTH[::2], ids=str)
def test_sequences_beside_each_other_decode_as_alone(variant: str, dtype: torch.dtype) -> None:
    decoder = Decoder(tiny_model(variant, seed=3).to(dtype))
    prompts = [list(range(3, 13)), [7, 8], list(range(1, 40)), [50, 40, 30, 20], list(range(60, 85)), [9, 9, 4] * 3]
    limits = [Limits(30), Limits(40), Limits(12), Limits(1), Limits(25), Limits(40)]
    scheduler, jobs = Scheduler(decoder, 4), list[Job[Generation]]()
    for ids, limit, planner in zip(prompts, limits, planners(decoder), strict=True):
        session = scheduler.session()
        jobs.append(scheduler.add(session, generating(session, ids, planner, limit), ids))
    steps = 0
    while scheduler.running or scheduler.waiting:
        scheduler.step()
        steps += 1
    assert steps < sum(limit.max_new_tokens for limit in limits), "they shared forwards"
    for ids, limit, job in zip(prompts, limits, jobs, strict=True):
        assert_as_alone(decoder, GREEDY, ids, limit, job.ended().token_ids)


def test_sequences_of_one_mask_draft_together() -> None:
    """And a step runs the full model once, whoever takes part in it."""
    decoder, forwards = Decoder(tiny_model("qwen3", seed=5)), list[tuple[bool, int]]()
    run = decoder.run

    def counted(x: torch.Tensor, batch: Batch, mask: SubLayerPlan | None = None, **named: Any) -> torch.Tensor:
        forwards.append((mask is None, len(batch.segments)))
        return run(x, batch, mask, **named)

    decoder.run = counted  # type: ignore[method-assign]
    scheduler, mask = Scheduler(decoder, 3), SubLayerPlan.of(4, {2, 5})
    for ids in ([1, 2, 3], [4, 5, 6], [7, 8, 9]):
        planner = ConstantPlanner(Plan.masked("test", mask, 2))
        scheduler.add(session := Session(decoder), generating(session, ids, planner, Limits(10)), ids)
    scheduler.step()
    assert forwards == [(True, 3), (False, 3), (False, 3)], "prompts together, then two draft steps together"
    forwards.clear()
    scheduler.step()
    assert forwards[0] == (True, 3)
    assert sum(full for full, _ in forwards) == 1


def test_memory_bounds_who_decodes_at_once() -> None:
    """A job that finds the memory full is paused, and goes on where it was; only one that is alone can fail of it."""
    decoder, limits = Decoder(tiny_model("llama")), Limits(60)
    prompts = [[1, 2, 3], [4, 5, 6, 7], [8] * 12]
    with small_memory():
        scheduler = Scheduler(decoder, 8, cache_bytes=150 * decoder.kv_layout.bytes_per_slot)
        jobs, paused = list[Job[Generation]](), 0
        for ids in prompts:
            session = scheduler.session()
            jobs.append(scheduler.add(session, generating(session, ids, PlainPlanner(), limits), ids))
        while scheduler.running or scheduler.waiting:
            scheduler.step()
            paused += scheduler.waiting > 0
        assert paused > 0, "all three do not fit once they have grown"
        for ids, job in zip(prompts, jobs, strict=True):
            assert_as_alone(decoder, GREEDY, ids, limits, job.ended().token_ids)
        scarce = Scheduler(decoder, 8, cache_bytes=70 * decoder.kv_layout.bytes_per_slot)
        jobs = []
        for ids in ([9] * 80, [1, 2, 3]):
            session = scarce.session()
            jobs.append(scarce.add(session, generating(session, ids, PlainPlanner(), Limits(9)), ids))
        while scarce.running or scarce.waiting:
            scarce.step()
        with pytest.raises(UserError, match="for keys and values are full; shorten the prompt"):
            jobs[0].ended()
        assert_as_alone(decoder, GREEDY, [1, 2, 3], Limits(9), jobs[1].ended().token_ids)


@pytest.mark.parametrize("beside", [False, True], ids=["ended", "running"])
@pytest.mark.parametrize("variant", ["gemma3", "mistral-sliding"])
def test_a_prompt_asked_again_is_right_after_its_window_was_dropped(variant: str, beside: bool) -> None:
    """Its keys are those of a running or an ended sequence, and no other sequence's are touched."""
    decoder = Decoder(tiny_model(variant, seed=4, max_position_embeddings=512))
    shared, other = [5 + i % 40 for i in range(33)], [9, 8, 7] * 4
    with small_memory():
        scheduler = Scheduler(decoder, 8)
        asked = [(other, Limits(300)), (shared, Limits(260 if beside else 200))]

        def ask(ids: list[int], limits: Limits) -> Job[Generation]:
            session = scheduler.session()
            return scheduler.add(session, generating(session, ids, PlainPlanner(), limits), ids)

        jobs = [ask(ids, limits) for ids, limits in asked]
        for _ in range(215):
            scheduler.step()
        assert jobs[1].done is not beside
        asked.append((shared, Limits(40)))
        jobs.append(ask(*asked[-1]))
        while scheduler.running or scheduler.waiting:
            scheduler.step()
        assert jobs[2].ended().num_cached_tokens == 32
        for (ids, limits), job in zip(asked, jobs, strict=True):
            assert_as_alone(decoder, GREEDY, ids, limits, job.ended().token_ids)


def test_a_cancelled_job_says_so() -> None:
    decoder = Decoder(tiny_model("llama"))
    scheduler = Scheduler(decoder, 2)
    session = scheduler.session()
    job = scheduler.add(session, generating(session, [1, 2], PlainPlanner(), Limits(9)), [1, 2])
    with pytest.raises(UserError, match="has not ended"):
        job.ended()
    scheduler.cancel(job)
    with pytest.raises(UserError, match="was cancelled"):
        job.ended()


@pytest.mark.parametrize("variant", ["llama", "mistral-sliding", "gemma3", "phi3-longrope", "qwen3.5"])
def test_a_prompt_that_several_requests_share_is_run_once(variant: str) -> None:
    decoder, shared = Decoder(tiny_model(variant)), [5 + i % 40 for i in range(33)]
    prompts = [[*shared, last] for last in (3, 3, 4, 3)]
    with small_memory():
        scheduler, jobs = Scheduler(decoder, 8), list[Job[Generation]]()
        for number, ids in enumerate(prompts):
            session = scheduler.session(owner="other" if number == 3 else "")
            work = generating(session, ids, planners(decoder)[number % 3], Limits(30))
            jobs.append(scheduler.add(session, work, ids))
        while scheduler.running or scheduler.waiting:
            scheduler.step()
        cached = [job.ended().num_cached_tokens for job in jobs]
        assert cached == [0, 32, 32, 0], "the first one runs it, and another stream never shares"
        for ids, job in zip(prompts, jobs, strict=True):
            assert_as_alone(decoder, GREEDY, ids, Limits(30), job.ended().token_ids)
        assert scheduler.pool.used_bytes == scheduler.prefixes.bytes


def test_the_most_tokens_of_a_pool_are_those_of_a_lone_request() -> None:
    for variant in ("llama", "mistral-sliding", "gemma3"):
        decoder = Decoder(tiny_model(variant))
        with small_memory():
            for slots in (90, 131, 200):
                scheduler = Scheduler(decoder, 3, cache_bytes=slots * decoder.kv_layout.bytes_per_slot)
                most = scheduler.most_tokens
                assert most > 0
                for length in (1, most // 2, most - 1):
                    ids, session = [7] * length, scheduler.session()
                    work = generating(session, ids, planners(decoder)[1], Limits(most - length))
                    assert len(scheduler.finish(scheduler.add(session, work, ids)).token_ids) == most - length


def test_a_job_that_fails_takes_no_other_with_it() -> None:
    decoder = Decoder(tiny_model("llama"))
    scheduler = Scheduler(decoder, 3)
    sessions = [Session(decoder) for _ in range(3)]
    prompts = [[1, 2, 3], [5] * 300, []]
    jobs = [
        scheduler.add(session, generating(session, ids, PlainPlanner(), Limits(6)), ids)
        for session, ids in zip(sessions, prompts, strict=True)
    ]
    while scheduler.running or scheduler.waiting:
        scheduler.step()
    assert len(jobs[0].ended().token_ids) == 6
    with pytest.raises(UserError, match="context holds 128"):
        jobs[1].ended()
    with pytest.raises(UserError, match="is empty"):
        jobs[2].ended()


MODELS = {
    (variant, dtype): Decoder(tiny_model(variant, seed=8).to(dtype))
    for variant in ("qwen3", "gemma3", "phi3-longrope", *SHARING, *HYBRIDS)
    for dtype in (torch.float32, torch.bfloat16)
}
MODELS |= {
    ("qwen3.5 mtp", dtype): Decoder(with_mtp("qwen3.5", seed=8, agreeing=True).to(dtype))
    for dtype in (torch.float32, torch.bfloat16)
}
WITH_KEYS = [model for model in sorted(MODELS, key=str) if model[0].partition(" ")[0] not in HYBRIDS]
with TemporaryDirectory() as folder:
    MODELS |= {
        (f"{variant} packed", torch.float32): Decoder(quantised_pair(Path(folder), variant, Type.Q8_0)[0])
        for variant in HYBRIDS
    }
WITH_STATES = [model for model in sorted(MODELS, key=str) if model not in WITH_KEYS]
BEGINNING = list(range(20, 45))
SAMPLINGS = [GREEDY, SamplingParams(repetition_penalty=1.3), SamplingParams(0.8, top_p=0.9)]


def forget_free_slots(scheduler: Scheduler) -> None:
    """Whatever is read from them from here on must have been written again."""
    for group in scheduler.pool.groups:
        for begin, end in group.ranges._free:
            for layer in group.layers:
                scheduler.pool.storage[layer][:, :, :, begin:end] = float("nan")


class Crowd(RuleBasedStateMachine):
    """Requests come, step and leave in any order; each that ends has the output that it has alone.

    The memory is small: requests are paused, and those that begin like earlier ones go on from their keys.
    """

    @initialize(
        model=st.sampled_from(WITH_KEYS),
        most=st.integers(1, 5),
        slots=st.sampled_from([140, 220, 600]),
        late=st.booleans(),
    )
    def begin(self, model: tuple[str, torch.dtype], most: int, slots: int, late: bool) -> None:
        self._begin(model, most, slots, late)

    def _begin(self, model: tuple[str, torch.dtype], most: int, slots: int, late: bool) -> None:
        self.memory = small_memory()
        self.memory.__enter__()
        self.decoder = MODELS[model]
        # Where the time for drafts is always up, requests are met in the middle of theirs.
        clock = count().__next__ if late else None
        layout = self.decoder.kv_layout
        self.scheduler = Scheduler(
            self.decoder, most, slots * layout.bytes_per_slot + 2 * most * layout.state_bytes, clock
        )
        self.stream = stream_by_the_table()
        self.asked: list[tuple[Job[Generation], list[int], Limits, SamplingParams]] = []

    @rule(
        ids=st.lists(st.integers(1, 90), min_size=1, max_size=45) | st.integers(1, 30).map(lambda n: [*BEGINNING, n]),
        new=st.integers(1, 20),
        kind=st.integers(0, 8),
        sampling=st.sampled_from(SAMPLINGS),
        seed=st.integers(0, 9),
    )
    def add(self, ids: list[int], new: int, kind: int, sampling: SamplingParams, seed: int) -> None:
        params, limits = replace(sampling, seed=seed), Limits(new)
        session = self.scheduler.session(params)
        work = generating(session, ids, planners(self.decoder, self.stream)[min(kind, 5)], limits)
        self.asked.append((self.scheduler.add(session, work, ids), ids, limits, params))

    @rule(times=st.integers(1, 6))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.scheduler.step()

    @precondition(lambda self: hasattr(self, "scheduler") and self.scheduler.running)
    @rule(times=st.integers(1, 2))
    def preempt(self, times: int) -> None:
        for _ in range(min(times, self.scheduler.running)):
            self.scheduler.pause_latest()
        forget_free_slots(self.scheduler)

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        place = data.draw(st.integers(0, len(self.asked) - 1))
        self.scheduler.cancel(self.asked.pop(place)[0])

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        try:
            while self.scheduler.running or self.scheduler.waiting:
                self.scheduler.step()
            assert not self.stream.steps.members
            for job, ids, limits, params in self.asked:
                assert_as_alone(self.decoder, params, ids, limits, job.ended().token_ids)
            while self.scheduler.prefixes.forget_oldest():
                pass
            assert self.scheduler.pool.used_bytes == 0, "every request gave its memory back"
        finally:
            self.memory.__exit__(None, None, None)


TestCrowd = Crowd.TestCase
TestCrowd.settings = settings(max_examples=25, stateful_step_count=14, deadline=None)


class Hybrids(Crowd):
    """The same with layers whose states no number cuts."""

    @initialize(
        model=st.sampled_from(WITH_STATES),
        most=st.integers(1, 5),
        slots=st.sampled_from([140, 220, 600]),
        late=st.booleans(),
    )
    def begin(self, model: tuple[str, torch.dtype], most: int, slots: int, late: bool) -> None:
        self._begin(model, most, slots, late)


TestHybrids = Hybrids.TestCase
TestHybrids.settings = settings(max_examples=12, stateful_step_count=14, deadline=None)


PLANTED, WEAK = plant(tiny_model("qwen3", seed=4, max_position_embeddings=512), 0.01, 12)
DECODER = Decoder(PLANTED)
PROMPTS = [[7, 7, 9], [1, 2, 3, 4], [5, 6] * 9, [50, 40, 30], [8], list(range(20, 60))]


@pytest.fixture
def drafts() -> Iterator[list[int]]:
    """The numbers of sequences that shared each draft step."""
    run, seen = DECODER.run, list[int]()

    def counted(x: torch.Tensor, batch: Batch, mask: SubLayerPlan | None = None, **named: Any) -> torch.Tensor:
        if mask is not None:
            seen.append(len(batch.segments))
        return run(x, batch, mask, **named)

    DECODER.run = counted  # type: ignore[method-assign]
    yield seen
    DECODER.run = run  # type: ignore[method-assign]


def together(table: LatencyTable, sampling: SamplingParams, new_tokens: int = 60) -> list[Generation]:
    """All prompts at once in one stream, with masks that are nearly always right."""
    table = replace(table, layer_kinds=("full",) * DECODER.shape.num_layers, head=table.head / 10)
    masks, heads = {"mix": Frontier((Entry("weak", WEAK, profile(0.95)),))}, ExitHeads(DECODER)
    stream, scheduler, jobs = stream_by_the_table(), Scheduler(DECODER, len(PROMPTS)), list[Job[Generation]]()
    for ids in PROMPTS:
        session, planner = Session(DECODER, sampling), AutoPlanner(masks, {}, heads, None, table, stream)
        jobs.append(
            scheduler.add(session, generating(session, ids, planner, Limits(new_tokens)), len(ids) + new_tokens)
        )
    while scheduler.running or scheduler.waiting:
        scheduler.step()
    assert stream.steps.members == {}
    assert stream.budgets.waiting == len(PROMPTS)
    return [job.ended() for job in jobs]


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(0.7, seed=1)])
def test_auto_drafts_together_and_every_output_is_what_it_is_alone(sampling: SamplingParams, drafts: list[int]) -> None:
    found = together(FLAT, sampling)
    for ids, generation in zip(PROMPTS, found, strict=True):
        alone = generate(Session(DECODER, sampling), ids, PlainPlanner(), Limits(60))
        assert generation.token_ids == alone.token_ids
    shared = [count for count in drafts if count > 1]
    assert max(drafts) >= len(PROMPTS) - 1, "one draft step of all, but for one with guesses"
    assert len(shared) > 0.8 * len(drafts), "hardly anyone drafts alone"
    cycles = [cycle for generation in found for cycle in generation.cycles]
    joint = [cycle for cycle in cycles if cycle.load is not None and cycle.load.sequences > 1 and cycle.plan.mask]
    assert sum(cycle.accepted for cycle in joint) > 100
    assert sum(len(generation.cycles) for generation in found) < 0.6 * 60 * len(PROMPTS)
