"""Sequences that search at once decode as each does alone, and all that they run is run by the runner."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import pytest
import torch

from ssd_profiles.mask import SubLayerPlan
from ssd_runtime.engine.loop import generate
from ssd_runtime.engine.output.output import Limits
from ssd_runtime.engine.scheduler import Scheduler
from ssd_runtime.model.batch.batch import Variants
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.model.head.output_head import OutputHead
from ssd_runtime.model.runner import Forward, Head, ModelRequest, ModelRunner, Work
from ssd_runtime.model.sublayers.sublayers import SubLayers
from ssd_runtime.planning.papers.swift import SwiftPlanner
from ssd_runtime.planning.strategy import MakePlanner
from ssd_runtime.sampling.params import GREEDY, SamplingParams
from ssd_runtime.search.replay import ReferenceStates
from ssd_runtime.sequence.session import Session
from tests.decoding import strategy_of
from tests.models import HYBRIDS, tiny_model
from tests.small_memory import small_memory
from tests.together import add, assert_as_alone, finish

PROMPTS = [list(range(3, 13)), [7, 8], list(range(1, 34)), [50, 40, 30, 20], list(range(60, 85))]
LIMITS = [Limits(30), Limits(40), Limits(25), Limits(40), Limits(25)]
SETTINGS = {
    "swift": ["window=6", "steps=60", "bayes_interval=4", "enough=1"],
    "clasp": ["refresh=3", "confidence=0.1"],
    "knapsack": ["refresh=4", "window=2", "confidence=0.1", "share=1"],
    "del": ["every=1", "refresh=3", "confidence=0.1"],
}


def has_variants(request: ModelRequest) -> bool:
    return isinstance(request, Forward) and any(isinstance(each, Variants) for each in request.segments)


SEARCHES: dict[str, Callable[[ModelRequest], bool]] = {
    "swift": lambda asked: isinstance(asked, Forward) and asked.mask is not None and asked.first > 0,
    "clasp": has_variants,
    "knapsack": has_variants,
    "del": lambda asked: isinstance(asked, Head) and asked.best,
}
"""Tells a strategy's searches from its drafts."""


def strategy(name: str, decoder: Decoder) -> MakePlanner:
    return strategy_of(name, decoder, *SETTINGS[name])


@contextmanager
def run_by_the_runner_alone() -> Iterator[list[list[ModelRequest]]]:
    """Let nobody run the decoder outside of `ModelRunner.answer`; gives what that is asked."""
    asked, entered, answer = list[list[ModelRequest]](), list[bool](), ModelRunner.answer

    def noted(self: ModelRunner, requests: Sequence[ModelRequest]) -> list[Any]:
        asked.append(list(requests))
        entered.append(True)
        try:
            return answer(self, requests)
        finally:
            entered.pop()

    def guarded(method: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def checked(*given: Any, **named: Any) -> torch.Tensor:
            assert entered, f"{method.__name__} was called by another than the runner"
            return method(*given, **named)

        return checked

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelRunner, "answer", noted)
        methods = {Decoder: ("run", "logits"), OutputHead: ("__call__",), SubLayers: ("attention", "mlp")}
        for owner, names in methods.items():
            for name in names:
                patch.setattr(owner, name, guarded(getattr(owner, name)))
        yield asked


@pytest.mark.parametrize(
    ("variant", "dtype", "sampling"),
    [
        ("phi3-longrope", torch.float32, SamplingParams(0.8, top_p=0.9, repetition_penalty=1.2, seed=5)),
        ("gemma3", torch.bfloat16, GREEDY),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_sequences_that_search_beside_each_other_decode_as_alone(
    name: str, variant: str, dtype: torch.dtype, sampling: SamplingParams
) -> None:
    decoder = Decoder(tiny_model(variant, seed=3).to(dtype))
    make, scheduler = strategy(name, decoder), Scheduler(decoder, 3)
    with run_by_the_runner_alone() as asked:
        jobs = [add(scheduler, *request, make(), sampling) for request in zip(PROMPTS, LIMITS, strict=True)]
        finish(scheduler)
    searches = [request for requests in asked for request in requests if SEARCHES[name](request)]
    assert len(searches) >= 4 * len(PROMPTS), "they have searched"
    assert name != "swift" or {request.size for request in searches} == {6}, "the window, however long cycles were"
    if name == "clasp":
        starts = [{*each.lineage.starts} for asked in searches for each in asked.segments]  # type: ignore[union-attr]
        assert {len(each) for each in starts} == {1}, "the last accepted token alone"
    for ids, limits, job in zip(PROMPTS, LIMITS, jobs, strict=True):
        assert_as_alone(decoder, sampling, ids, limits, job.ended().token_ids)


@pytest.mark.parametrize("variant", ["gemma3", "lfm2"])
@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_a_search_finds_the_keys_that_it_goes_back_to(name: str, variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sliding layers drop keys, and states go on; what a search runs again still sees its own window."""
    monkeypatch.setattr("ssd_runtime.planning.papers.swift.LATER", 20)
    decoder = Decoder(tiny_model(variant, seed=3, max_position_embeddings=512))
    limits = Limits(60 if variant in HYBRIDS else 250)
    with small_memory():
        session, whole = Session(decoder), Session(decoder)
        whole.look_back(1 << 30)
        runs = [generate(each, PROMPTS[0], strategy(name, decoder)(), limits) for each in (session, whole)]
        sliding = [
            lease for lease, group in zip(session.cache.leases, session.cache.pool.groups, strict=True) if group.window
        ]
        assert sliding or variant in HYBRIDS
        assert all(lease.first > 0 for lease in sliding)
    plans = [[cycle.plan.mask for cycle in run.cycles] for run in runs]
    assert plans[0] == plans[1], "with the same keys they find the same masks"
    assert runs[0].token_ids == runs[1].token_ids


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_a_search_needs_no_more_memory_than_plain_decoding_however_long_the_answer(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ssd_runtime.planning.papers.swift.LATER", 20)
    decoder = Decoder(tiny_model("gemma3", seed=3, max_position_embeddings=512))
    with small_memory():
        scheduler = Scheduler(decoder, 1)
        got = scheduler.finish(add(scheduler, PROMPTS[0], Limits(400), strategy(name, decoder)()))
        assert_as_alone(decoder, GREEDY, PROMPTS[0], Limits(400), got.token_ids)


def test_masks_are_compared_on_the_tokens_of_one_request_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """An easy request's scores would beat those of the best mask on a hard one."""
    decoder, scored = Decoder(tiny_model("qwen3", seed=3)), list[SwiftPlanner]()
    matching, make = SwiftPlanner._matching, strategy("swift", decoder)

    def noted(self: SwiftPlanner, window: ReferenceStates, mask: SubLayerPlan) -> Work[float]:
        scored.append(self)
        return matching(self, window, mask)

    monkeypatch.setattr(SwiftPlanner, "_matching", noted)
    scheduler = Scheduler(decoder, 3)
    for ids in PROMPTS:
        add(scheduler, ids, Limits(40), make())
    finish(scheduler)
    turns = [planner for planner, _ in groupby(scored)]
    assert len(turns) == len(set(turns)) > 1


@pytest.mark.parametrize("name", ["clasp", "knapsack"])
def test_searches_that_fall_due_together_share_their_forwards(name: str) -> None:
    """Three sequences in step run no more forwards than one."""
    decoder, counts = Decoder(tiny_model("qwen3", seed=3)), list[int]()
    for sequences in (1, 3):
        scheduler, make = Scheduler(decoder, 3), strategy(name, decoder)
        for _ in range(sequences):
            add(scheduler, [5, 6, 7], Limits(8), make())
        with run_by_the_runner_alone() as asked:
            finish(scheduler)
        searching = [requests for requests in asked if any(map(has_variants, requests))]
        assert {len({request.key for request in requests}) for requests in searching} == {1}
        assert all(len(requests) == sequences for requests in searching)
        counts.append(len(searching))
    assert counts[0] == counts[1] > 0
