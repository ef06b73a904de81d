"""A long draft or search of one request does not hold the others, and its own output stays what it is alone."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
import torch

from ssd_profiles.mask import SubLayerPlan
from ssd_runtime.drafting.early_exit import EarlyExit
from ssd_runtime.engine.job import Job, is_full
from ssd_runtime.engine.loop import generating
from ssd_runtime.engine.output.generation import Generation
from ssd_runtime.engine.output.output import Limits
from ssd_runtime.engine.scheduler import HOLD_SECONDS, PREFILL_ROWS, Scheduler
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.model.exit_heads import ExitHeads
from ssd_runtime.model.runner import Forward, Head
from ssd_runtime.planning.plan import ConstantPlanner, PlainPlanner, Plan, Planner
from ssd_runtime.sampling.params import GREEDY, SamplingParams
from tests.decoding import plainly, speculate, strategy_of
from tests.models import MIXERS, tiny_model
from tests.small_memory import small_memory
from tests.together import add, assert_as_alone, forget_free_slots

FORWARD = 0.01
"""Seconds of a forward by the stand-in clock, which is a whole step of most sequences here."""
LONG = {
    "swift": ["window=8", "max_draft=24", "confidence=0", "enough=1", "skip=0.3"],
    "clasp": ["refresh=1", "max_draft=24", "confidence=0"],
    "knapsack": ["refresh=1", "window=1", "max_draft=24", "states=0", "share=1", "confidence=0"],
    "del": ["every=1", "refresh=1", "max_draft=24", "confidence=0"],
    "exit": ["threshold=0", "width=24", "depth=1"],
}
PROMPT = list(range(3, 13))
SAMPLINGS = {
    "phi3-longrope": SamplingParams(0.8, top_p=0.9, seed=5),
    "gemma3": SamplingParams(1.0, seed=2, rejection=True),
    "qwen3.5": GREEDY,
    "lfm2": SamplingParams(0.8, seed=3),
}
CASES = [(name, variant) for name in ("mask", "tree", "stops") for variant in SAMPLINGS]
CASES += [(name, "phi3-longrope") for name in LONG]
CASES += [("swift", "lfm2"), ("clasp", "qwen3.5"), ("knapsack", "lfm2"), ("del", "qwen3.5"), ("exit", "lfm2")]
"""Every plan with every variant, and every search with positions that turn and with states."""


def planner(name: str, decoder: Decoder) -> Planner:
    if name == "mask":
        return ConstantPlanner(Plan.masked("long", SubLayerPlan.of(4, {2, 5}), 24))
    if name == "tree":
        return ConstantPlanner(Plan.masked("tree", SubLayerPlan.of(4, {1, 4}), 20, branching=((1.0, 3),)))
    if name == "stops":
        return ConstantPlanner(Plan("stops", EarlyExit(ExitHeads(decoder), (1, 2, 3), 0.1), 24))
    return strategy_of(name, decoder, *LONG[name])()


class Clock:
    """Stands in for the time: every forward of the decoder takes `FORWARD` seconds."""

    def __init__(self, decoder: Decoder) -> None:
        self.now = 0.0
        self._run = decoder.run
        decoder.run = self.run  # type: ignore[method-assign]

    def run(self, *given: Any, **named: Any) -> torch.Tensor:
        """Run the decoder."""
        self.now += FORWARD
        return self._run(*given, **named)

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("name", ["mask", "tree", "stops", *LONG])
def test_a_step_of_others_waits_for_a_long_draft_no_longer_than_is_stated(name: str) -> None:
    """They get a token in every step, too."""
    decoder = Decoder(tiny_model("qwen3", seed=3))
    alone = plainly(decoder, PROMPT, 30)
    clock = Clock(decoder)
    scheduler = Scheduler(decoder, 2, clock=clock)
    slow = add(scheduler, PROMPT, Limits(30), planner(name, decoder))
    scheduler.step()
    received = list[int]()
    session = scheduler.session()
    work = generating(session, [7, 8], PlainPlanner(), Limits(100), received.extend)
    quick = scheduler.add(session, work, [7, 8])
    behind = 0
    while not (slow.done or quick.done):
        began = clock.now
        tokens = len(received)
        scheduler.step()
        behind += not (slow.done or is_full(slow.request))
        # Beside the drafts: a forward of each, since states are kept apart, and the request that goes beyond the time.
        assert clock.now - began <= HOLD_SECONDS + 3.5 * FORWARD
        assert len(received) == tokens + 1
    assert behind or name == "del", "some drafts were too long for a step; DEL keeps to short ones here"
    finished = scheduler.finish(slow)
    assert finished.token_ids == alone
    assert any(cycle.held for cycle in finished.cycles) == bool(behind), "the others' steps are not the drafts' time"


def test_a_request_that_drafts_waits_for_a_short_part_of_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ssd_runtime.engine.scheduler.HOLD_FORWARDS", 0.0)
    decoder = Decoder(tiny_model("qwen3", seed=3, max_position_embeddings=1024))
    scheduler = Scheduler(decoder, 2, clock=count().__next__)
    slow = add(scheduler, PROMPT, Limits(60), planner("mask", decoder))
    while not slow.decodes or is_full(slow.request):
        scheduler.step()
    long = add(scheduler, [1 + place % 90 for place in range(900)], Limits(1), PlainPlanner())
    sizes, before = list[int](), 0
    while not (slow.done or long.done):
        scheduler.step()
        sizes.append(long.session.committed - before)
        before = long.session.committed
    assert 0 < max(sizes) <= PREFILL_ROWS


@pytest.mark.parametrize(("name", "variant"), CASES)
def test_a_request_that_loses_its_memory_within_a_draft_goes_on_where_it_was(
    name: str, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step is as short as can be, and every fifth one takes all memory of one request, whatever that waits for."""
    monkeypatch.setattr("ssd_runtime.planning.papers.swift.LATER", 8)
    decoder, sampling = Decoder(tiny_model(variant, seed=3)), SAMPLINGS[variant]
    prompts = [PROMPT, [7, 8]]
    whole, cut, within = list[Job[Generation]](), list[Job[Generation]](), 0
    with small_memory():
        for jobs, clock in ((whole, None), (cut, count().__next__)):
            scheduler = Scheduler(decoder, 2, clock=clock)
            jobs += [add(scheduler, ids, Limits(20), planner(name, decoder), sampling) for ids in prompts]
            for number in count():
                if not (scheduler.running or scheduler.waiting):
                    break
                scheduler.step()
                if clock is not None and number % 5 == 0 and scheduler.running:
                    within += not is_full(scheduler._running[-1].request)
                    scheduler.pause_latest()
                    forget_free_slots(scheduler)
    assert within > 0
    for ids, job, other in zip(prompts, cut, whole, strict=True):
        if not sampling.tests_drafts:
            assert_as_alone(decoder, sampling, ids, Limits(20), job.ended().token_ids)
        if name not in LONG:  # what a search finds may depend on rounding
            assert job.ended().token_ids == other.ended().token_ids
            assert [cycle.drafted for cycle in job.ended().cycles] == [each.drafted for each in other.ended().cycles]


@pytest.mark.parametrize("name", ["stops", "mask"])
def test_a_request_that_loses_its_memory_twice_in_a_row_goes_on_where_it_was(name: str) -> None:
    """The keys of its draft are computed again each time, also while its verification is pending."""
    decoder, within = Decoder(tiny_model("qwen3", seed=3)), 0
    with small_memory():
        scheduler = Scheduler(decoder, 1, clock=count().__next__)
        job = add(scheduler, PROMPT, Limits(30), planner(name, decoder))
        while not job.done:
            scheduler.step()
            if job.done or job.session.written == job.session.committed:
                continue
            within += 1
            for _ in range(2):
                scheduler.pause_latest()
                forget_free_slots(scheduler)
                while job._paused is not None and not job.done:
                    scheduler.step()
        assert within
        assert_as_alone(decoder, GREEDY, PROMPT, Limits(30), job.ended().token_ids)


@pytest.mark.parametrize("variant", MIXERS)
def test_a_draft_goes_on_from_the_states_of_whatever_row_it_was_paused_at(
    variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row that is requested but has not run takes no part in the states, however many the draft has."""
    monkeypatch.setattr("ssd_runtime.engine.scheduler.HOLD_FORWARDS", 0.0)
    decoder = Decoder(tiny_model(variant, seed=3))
    plan = Plan.masked("long", SubLayerPlan.of(4, {5}), 12)
    whole = speculate(decoder, PROMPT, plan, 40)
    scheduler = Scheduler(decoder, 1, clock=count().__next__)
    job = add(scheduler, PROMPT, Limits(40), ConstantPlanner(plan))
    places = [(row, kind) for row in range(2, 13) for kind in (Forward, Head)]
    while not job.done:
        scheduler.step()
        if places and places[0] == (job.session.written - job.session.committed, type(job.request)):
            del places[0]
            scheduler.pause_latest()
            forget_free_slots(scheduler)
    cut = job.ended()
    assert not places
    assert cut.token_ids == whole.token_ids
    assert [cycle.accepted for cycle in cut.cycles] == [cycle.accepted for cycle in whole.cycles]
