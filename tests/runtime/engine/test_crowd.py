"""Requests that come, step and leave in any order each have the output that they have alone."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from gguf import GGMLQuantizationType as Type
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from ssd_runtime.engine.job import Job
from ssd_runtime.engine.output.generation import Generation
from ssd_runtime.engine.output.output import Limits
from ssd_runtime.engine.scheduler import Scheduler
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.sampling.params import GREEDY, SamplingParams
from tests.gguf_files import quantised_pair
from tests.models import HYBRIDS, SHARING, tiny_model
from tests.mtp import MTP_VARIANTS, with_mtp
from tests.small_memory import small_memory
from tests.streams import stream_by_the_table
from tests.together import add, assert_as_alone, finish, forget_free_slots, planners

KINDS = ("bf16", "fp32")
WITH_KEYS = [(variant, kind) for variant in ("gemma3", *SHARING, "phi3-longrope", "qwen3") for kind in KINDS]
WITH_STATES = [(variant, kind) for variant in HYBRIDS for kind in (*KINDS, "packed")]
WITH_STATES += [(f"{variant} mtp", kind) for variant in MTP_VARIANTS[:1] for kind in KINDS]


@cache
def decoder_of(variant: str, kind: str) -> Decoder:
    if kind != "packed":
        name, _, mtp = variant.partition(" ")
        model = with_mtp(name, seed=8, agreeing=True) if mtp else tiny_model(name, seed=8)
        return Decoder(model.to(torch.bfloat16 if kind == "bf16" else torch.float32))
    with TemporaryDirectory() as folder:
        return Decoder(quantised_pair(Path(folder), variant, Type.Q8_0)[0])


BEGINNING = list(range(20, 45))
SAMPLINGS = [GREEDY, SamplingParams(repetition_penalty=1.3), SamplingParams(0.8, top_p=0.9)]


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
    def begin(self, model: tuple[str, str], most: int, slots: int, late: bool) -> None:
        self._begin(model, most, slots, late)

    def _begin(self, model: tuple[str, str], most: int, slots: int, late: bool) -> None:
        self.memory = small_memory()
        self.memory.__enter__()
        self.decoder = decoder_of(*model)
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
        planner = planners(self.decoder, self.stream)[min(kind, 5)]
        self.asked.append((add(self.scheduler, ids, limits, planner, params), ids, limits, params))

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
            finish(self.scheduler)
            assert not self.stream.steps.members
            for job, ids, limits, params in self.asked:
                assert_as_alone(self.decoder, params, ids, limits, job.ended().token_ids)
            while self.scheduler.prefixes.forget_oldest():
                pass
            assert self.scheduler.pool.used_bytes == 0, "every request gave its memory back"
        finally:
            self.memory.__exit__(None, None, None)


TestCrowd = Crowd.TestCase
TestCrowd.settings = settings(max_examples=16, stateful_step_count=14)


class Hybrids(Crowd):
    """Requests in models with recurrent layers, whose states cannot be cut to a number of tokens."""

    @initialize(
        model=st.sampled_from(WITH_STATES),
        most=st.integers(1, 5),
        slots=st.sampled_from([140, 220, 600]),
        late=st.booleans(),
    )
    def begin(self, model: tuple[str, str], most: int, slots: int, late: bool) -> None:
        self._begin(model, most, slots, late)


TestHybrids = Hybrids.TestCase
TestHybrids.settings = settings(max_examples=8, stateful_step_count=14)
