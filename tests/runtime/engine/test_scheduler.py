"""Whatever decodes beside it, a sequence's output is what it is alone."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch

from bench.fixtures.planted import plant
from ssd_profiles.errors import UserError
from ssd_profiles.mask import SubLayerPlan
from ssd_runtime.engine.job import Job
from ssd_runtime.engine.output.generation import Generation
from ssd_runtime.engine.output.output import Limits
from ssd_runtime.engine.scheduler import Scheduler
from ssd_runtime.model.batch.batch import Batch
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.model.exit_heads import ExitHeads
from ssd_runtime.planning.auto.auto import AutoPlanner
from ssd_runtime.planning.cost import Entry
from ssd_runtime.planning.frontier import Frontier
from ssd_runtime.planning.plan import ConstantPlanner, Plan
from ssd_runtime.sampling.params import GREEDY, SamplingParams
from tests.decoding import plainly
from tests.models import IN_BOTH, MIXERS, tiny_model
from tests.small_memory import BLOCK, small_memory
from tests.streams import stream_by_the_table
from tests.tables import profile
from tests.together import FLAT, add, assert_as_alone, finish, forget_free_slots, planners


@pytest.mark.parametrize(("variant", "dtype"), IN_BOTH[::3], ids=str)
def test_sequences_beside_each_other_decode_as_alone(variant: str, dtype: torch.dtype) -> None:
    decoder = Decoder(tiny_model(variant, seed=3).to(dtype))
    prompts = [list(range(3, 13)), [7, 8], list(range(1, 40)), [50, 40, 30, 20], list(range(60, 85)), [9, 9, 4] * 3]
    limits = [Limits(30), Limits(40), Limits(12), Limits(1), Limits(25), Limits(40)]
    scheduler = Scheduler(decoder, 4)
    jobs = [add(scheduler, *request) for request in zip(prompts, limits, planners(decoder), strict=True)]
    assert finish(scheduler) < sum(limit.max_new_tokens for limit in limits), "they shared forwards"
    for ids, limit, job in zip(prompts, limits, jobs, strict=True):
        assert_as_alone(decoder, GREEDY, ids, limit, job.ended().token_ids)


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, int]]:
    """Whether each forward was of the full model, and the number of sequences that shared it."""
    run, seen = Decoder.run, list[tuple[bool, int]]()

    def counted(
        self: Decoder, x: torch.Tensor, batch: Batch, mask: SubLayerPlan | None = None, *given: Any, **named: Any
    ) -> torch.Tensor:
        seen.append((mask is None, len(batch.segments)))
        return run(self, x, batch, mask, *given, **named)

    monkeypatch.setattr(Decoder, "run", counted)
    return seen


def test_sequences_of_one_mask_draft_together(forwards: list[tuple[bool, int]]) -> None:
    """And a step runs the full model once, whoever takes part in it."""
    scheduler = Scheduler(Decoder(tiny_model("qwen3", seed=5)), 3)
    for ids in ([1, 2, 3], [4, 5, 6], [7, 8, 9]):
        add(scheduler, ids, Limits(10), ConstantPlanner(Plan.masked("test", SubLayerPlan.of(4, {2, 5}), 2)))
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
        jobs, paused = [add(scheduler, ids, limits) for ids in prompts], 0
        while scheduler.running or scheduler.waiting:
            scheduler.step()
            paused += scheduler.waiting > 0
        assert paused > 0, "all three do not fit once they have grown"
        for ids, job in zip(prompts, jobs, strict=True):
            assert_as_alone(decoder, GREEDY, ids, limits, job.ended().token_ids)
        scarce = Scheduler(decoder, 8, cache_bytes=70 * decoder.kv_layout.bytes_per_slot)
        jobs = [add(scarce, ids, Limits(9)) for ids in ([9] * 80, [1, 2, 3])]
        finish(scarce)
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
        jobs = [add(scheduler, *request) for request in asked]
        for _ in range(215):
            scheduler.step()
        assert jobs[1].done is not beside
        asked.append((shared, Limits(40)))
        jobs.append(add(scheduler, *asked[-1]))
        finish(scheduler)
        assert jobs[2].ended().num_cached_tokens == 32
        for (ids, limits), job in zip(asked, jobs, strict=True):
            assert_as_alone(decoder, GREEDY, ids, limits, job.ended().token_ids)


@pytest.mark.parametrize("variant", ["gemma3", "mistral-sliding", *MIXERS[:2]])
def test_prompts_that_part_late_are_right_however_often_they_are_asked(variant: str) -> None:
    """A prompt must not resume from windows or states that an earlier prompt kept after other tokens."""
    decoder = Decoder(tiny_model(variant, seed=3, max_position_embeddings=512))
    shared = [5 + 3 * i % 80 for i in range(240)]
    with small_memory():
        scheduler = Scheduler(decoder, 1)
        for end in ([1], [2] * 5, [3] * 5, [3] * 5, [2] * 5, [2] * 5):
            job = add(scheduler, [*shared, *end], Limits(70))
            finish(scheduler)
            forget_free_slots(scheduler)
            assert_as_alone(decoder, GREEDY, [*shared, *end], Limits(70), job.ended().token_ids)


@pytest.mark.parametrize("variant", ["qwen3", "phi3-longrope"])
def test_the_keys_of_a_paused_request_are_nobodys(variant: str) -> None:
    decoder, shared = Decoder(tiny_model(variant, seed=3)), [5 + i % 40 for i in range(20)]
    with small_memory():
        scheduler = Scheduler(decoder, 2)
        jobs = [add(scheduler, [*shared, 3], Limits(12))]
        for _ in range(3):
            scheduler.step()
        scheduler.pause_latest()
        forget_free_slots(scheduler)
        jobs.append(add(scheduler, [*shared, 4], Limits(12)))
        finish(scheduler)
        for job, last in zip(jobs, (3, 4), strict=True):
            assert_as_alone(decoder, GREEDY, [*shared, last], Limits(12), job.ended().token_ids)


def test_a_forward_that_fails_ends_the_request_that_it_fails_for_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, prompts, limits = Decoder(tiny_model("qwen3.5", seed=3)), [[1, 2, 3], [4, 5, 6, 7], [8] * 12], Limits(20)
    scheduler = Scheduler(decoder, 3)
    jobs = [add(scheduler, *request) for request in zip(prompts, [limits] * 3, planners(decoder)[:3], strict=True)]
    run = decoder.run

    def failing(x: torch.Tensor, batch: Batch, *given: Any, **named: Any) -> torch.Tensor:
        out = run(x, batch, *given, **named)
        if jobs[1].session.committed > 10 and any(each.cache is jobs[1].session.cache for each in batch.segments):
            raise RuntimeError("a kernel fails")
        return out

    monkeypatch.setattr(decoder, "run", failing)
    finish(scheduler)
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="a kernel fails"):
        jobs[1].ended()
    for place in (0, 2):
        assert_as_alone(decoder, GREEDY, prompts[place], limits, jobs[place].ended().token_ids)


def test_a_cancelled_job_says_so() -> None:
    scheduler = Scheduler(Decoder(tiny_model("llama")), 2)
    job = add(scheduler, [1, 2], Limits(9))
    with pytest.raises(UserError, match="has not ended"):
        job.ended()
    scheduler.cancel(job)
    with pytest.raises(UserError, match="was cancelled"):
        job.ended()


@pytest.mark.parametrize("variant", ["gemma3", "phi3-longrope", "qwen3.5"])
def test_a_prompt_that_several_requests_share_is_run_once(variant: str) -> None:
    decoder, shared = Decoder(tiny_model(variant)), [5 + i % 40 for i in range(33)]
    prompts = [[*shared, last] for last in (3, 3, 4, 3)]
    with small_memory():
        scheduler = Scheduler(decoder, 8)
        jobs = [
            add(scheduler, ids, Limits(30), planners(decoder)[number % 3], owner="other" if number == 3 else "")
            for number, ids in enumerate(prompts)
        ]
        finish(scheduler)
        cached = [job.ended().num_cached_tokens for job in jobs]
        assert cached == [0, 32, 32, 0], "the first one runs it, and another stream never shares"
        for ids, job in zip(prompts, jobs, strict=True):
            assert_as_alone(decoder, GREEDY, ids, Limits(30), job.ended().token_ids)
        assert scheduler.pool.used_bytes == scheduler.prefixes.bytes


@pytest.mark.parametrize("variant", ["gemma3", "qwen3.5"])
def test_jobs_that_have_ended_take_no_memory(variant: str) -> None:
    """Whoever asks for many answers at once holds all jobs until the last one has ended."""
    decoder, jobs, held = Decoder(tiny_model(variant)), list[Job[Generation]](), list[int]()
    with small_memory():
        scheduler = Scheduler(decoder, 4)
        for _ in range(3):
            for planner in planners(decoder)[:3]:
                jobs.append(add(scheduler, [5 + i % 40 for i in range(33)], Limits(16), planner, SamplingParams(0.8)))
            finish(scheduler)
            while scheduler.prefixes.forget_oldest():
                pass
            gc.collect()
            held.append(sum(each.nbytes for each in gc.get_objects() if type(each) is torch.Tensor))
    assert held[1] == held[2]


@pytest.mark.parametrize("ids", [[3, 4, 5], [9] * (BLOCK + 1)])
def test_short_prompts_go_along_with_a_long_one_and_do_not_starve_it(ids: list[int]) -> None:
    """Also if they could copy the little that they share with it."""
    decoder = Decoder(tiny_model("llama", max_position_embeddings=512))
    with small_memory():
        scheduler = Scheduler(decoder, 4)
        beside = add(scheduler, [1, 2], Limits(400))
        scheduler.step()
        long, waited = add(scheduler, [9] * 400, Limits(2)), list[int]()
        while not (long.session.prefilled or long.done):  # what has ended keeps no prefill
            short, began = add(scheduler, ids, Limits(2)), len(beside.session.ids)
            while not short.session.prefilled and not short.done:
                scheduler.step()
            waited.append(len(beside.session.ids) - began)
            scheduler.finish(short)
        assert max(waited) <= 2
        assert len(beside.session.ids) <= 2 * 400 / (2 * BLOCK) + 4, "twice as many steps as alone"


def test_prompts_that_share_nothing_do_not_wait_for_those_that_wait() -> None:
    decoder, shared = Decoder(tiny_model("llama")), [5 + i % 40 for i in range(100)]
    with small_memory():
        scheduler = Scheduler(decoder, 4)
        first, second, other = (add(scheduler, ids, Limits(9)) for ids in ([*shared, 3], [*shared, 4], [7, 8]))
        scheduler.finish(other)
        assert not first.session.prefilled
        finish(scheduler)
        assert second.ended().num_cached_tokens == 100


@torch.no_grad()
def test_a_request_that_has_waited_decodes_by_the_weights_of_its_start() -> None:
    model, ids = tiny_model("llama"), list(range(1, 41))
    decoder = Decoder(model)
    with small_memory():
        scheduler = Scheduler(decoder, 1)
        scheduler.finish(add(scheduler, ids, Limits(2)))
        waiting = add(scheduler, ids, Limits(9))
        model.model.layers[0].self_attn.v_proj.weight.mul_(-2.0)
        got = scheduler.finish(waiting)
    assert got.num_cached_tokens == 0
    assert got.token_ids == plainly(Decoder(model), ids, 9)


def test_the_most_tokens_of_a_pool_are_those_of_a_lone_request() -> None:
    for variant in ("llama", "gemma3"):
        decoder = Decoder(tiny_model(variant))
        with small_memory():
            for slots in (90, 131, 200):
                scheduler = Scheduler(decoder, 3, cache_bytes=slots * decoder.kv_layout.bytes_per_slot)
                most = scheduler.most_tokens
                assert most > 0
                for length in (1, most // 2, most - 1):
                    job = add(scheduler, [7] * length, Limits(most - length), planners(decoder)[1])
                    assert len(scheduler.finish(job).token_ids) == most - length


PLANTED, WEAK = plant(tiny_model("qwen3", seed=4, max_position_embeddings=512), 0.01, 12)
DECODER = Decoder(PLANTED)
PROMPTS = [[7, 7, 9], [1, 2, 3, 4], [5, 6] * 9, [50, 40, 30], [8], list(range(20, 60))]


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(0.7, seed=1)])
def test_auto_drafts_together_and_every_output_is_what_it_is_alone(
    sampling: SamplingParams, forwards: list[tuple[bool, int]]
) -> None:
    """All prompts at once in one stream, with masks that are nearly always right."""
    table = replace(FLAT, layer_kinds=("full",) * DECODER.shape.num_layers, head=FLAT.head / 10)
    masks, heads = {"mix": Frontier((Entry("weak", WEAK, profile(0.95)),))}, ExitHeads(DECODER)
    stream, scheduler = stream_by_the_table(), Scheduler(DECODER, len(PROMPTS))
    jobs = [
        add(scheduler, ids, Limits(60), AutoPlanner(masks, {}, heads, None, table, stream), sampling) for ids in PROMPTS
    ]
    finish(scheduler)
    assert stream.steps.members == {}
    assert stream.budgets.waiting == len(PROMPTS)
    drafts = [count for full, count in forwards if not full]
    found = [job.ended() for job in jobs]
    for ids, generation in zip(PROMPTS, found, strict=True):
        assert generation.token_ids == plainly(DECODER, ids, 60, sampling)
    shared = [count for count in drafts if count > 1]
    assert max(drafts) >= len(PROMPTS) - 1, "one draft step of all, but for one with guesses"
    assert len(shared) > 0.8 * len(drafts), "hardly anyone drafts alone"
    cycles = [cycle for generation in found for cycle in generation.cycles]
    joint = [cycle for cycle in cycles if cycle.load is not None and cycle.load.sequences > 1 and cycle.plan.mask]
    assert sum(cycle.accepted for cycle in joint) > 100
    assert sum(len(generation.cycles) for generation in found) < 0.6 * 60 * len(PROMPTS)
