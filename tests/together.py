"""Sequences that decode together, and what each has alone."""

from __future__ import annotations

import torch

from ssd_profiles.mask import SubLayerPlan
from ssd_runtime.drafting.early_exit import EarlyExit
from ssd_runtime.drafting.mtp import MtpChain
from ssd_runtime.engine.job import Job
from ssd_runtime.engine.loop import generate, generating
from ssd_runtime.engine.output.divergence import Kind, compare
from ssd_runtime.engine.output.generation import Generation
from ssd_runtime.engine.output.output import Limits
from ssd_runtime.engine.scheduler import Scheduler
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.model.exit_heads import ExitHeads
from ssd_runtime.planning.auto.auto import AutoPlanner
from ssd_runtime.planning.auto.stream import Stream
from ssd_runtime.planning.cost import Entry
from ssd_runtime.planning.frontier import Frontier
from ssd_runtime.planning.plan import ConstantPlanner, PlainPlanner, Plan, Planner
from ssd_runtime.sampling.params import GREEDY, SamplingParams
from ssd_runtime.sequence.session import Session
from tests.streams import stream_by_the_table
from tests.tables import latency_table, profile

FLAT = latency_table(4, per_token=1e-7)
"""Rows that cost nothing."""
PLAIN = PlainPlanner()


def add(
    scheduler: Scheduler,
    ids: list[int],
    limits: Limits,
    planner: Planner = PLAIN,
    params: SamplingParams = GREEDY,
    owner: str = "",
) -> Job[Generation]:
    """Add a request to a scheduler."""
    session = scheduler.session(params, owner=owner)
    return scheduler.add(session, generating(session, ids, planner, limits), ids)


def finish(scheduler: Scheduler) -> int:
    """Step until every request has ended; returns the number of steps."""
    steps = 0
    while scheduler.running or scheduler.waiting:
        scheduler.step()
        steps += 1
    return steps


def assert_as_alone(decoder: Decoder, params: SamplingParams, ids: list[int], limits: Limits, got: list[int]) -> None:
    """A first difference is no more than what this model's rows differ by anyway, when they are run at once."""
    alone = generate(Session(decoder, params), ids, PLAIN, limits).token_ids
    assert len(got) == len(alone)
    if got != alone:  # to measure the rounding takes as long as to decode
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


def forget_free_slots(scheduler: Scheduler) -> None:
    """Whatever is read from them from here on must have been written again."""
    for group in scheduler.pool.groups:
        for begin, end in group.ranges._free:
            for layer in group.layers:
                scheduler.pool.storage[layer][:, :, :, begin:end] = float("nan")


def planners(decoder: Decoder, stream: Stream | None = None) -> list[Planner]:
    """One planner of each kind, for a decoder of four layers."""
    mask = SubLayerPlan.of(4, {2, 5})
    masks = {"mix": Frontier((Entry("mask", mask, profile(0.95)),))}
    stream, has_mtp = stream or stream_by_the_table(), decoder.mtp is not None
    return [
        PLAIN,
        ConstantPlanner(Plan.masked("chain", mask, 4)),
        ConstantPlanner(Plan.masked("tree", SubLayerPlan.of(4, {1, 4}), 3, branching=((1.0, 3),))),
        ConstantPlanner(Plan("exit", EarlyExit(ExitHeads(decoder), (1, 2, 3), 0.1), 4)),
        ConstantPlanner(Plan("mtp", MtpChain(branching=((0.5, 2),)), 3) if has_mtp else Plan.masked("same", mask, 2)),
        AutoPlanner(masks, {}, ExitHeads(decoder), None, FLAT, stream, mtp=has_mtp),
    ]
