"""Whatever decodes beside it, a sequence's output is what it is alone."""

from __future__ import annotations

import pytest
import torch

from ssd_profiles.mask import SkipMask
from ssd_runtime.drafting.early_exit import EarlyExit
from ssd_runtime.engine.divergence import Kind, compare
from ssd_runtime.engine.loop import Generation, Limits, generate, generating
from ssd_runtime.engine.scheduler import Job, Scheduler
from ssd_runtime.engine.session import Session
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.model.exit_heads import ExitHeads
from ssd_runtime.planning.plan import ConstantPlanner, PlainPlanner, Plan, Planner
from tests.models import VARIANTS, tiny_model


def planners(decoder: Decoder) -> list[Planner]:
    mask = SkipMask.of(4, {2, 5})
    return [
        PlainPlanner(),
        ConstantPlanner(Plan.masked("chain", mask, 4)),
        ConstantPlanner(Plan.masked("tree", SkipMask.of(4, {1, 4}), 3, branching=((1.0, 3),))),
        ConstantPlanner(Plan("exit", EarlyExit(ExitHeads(decoder), (1, 2, 3), 0.1), 4)),
        ConstantPlanner(Plan.masked("same chain", mask, 2)),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_sequences_beside_each_other_decode_as_alone(variant: str, dtype: torch.dtype) -> None:
    decoder = Decoder(tiny_model(variant, seed=3).to(dtype))
    prompts = [list(range(3, 13)), [7, 8], list(range(1, 40)), [50, 40, 30, 20], list(range(60, 85))]
    limits = [Limits(30), Limits(40), Limits(12), Limits(1), Limits(25)]
    scheduler, jobs = Scheduler(decoder, 4), list[Job[Generation]]()
    for ids, limit, planner in zip(prompts, limits, planners(decoder), strict=True):
        session = Session(decoder)
        jobs.append(scheduler.add(session, generating(session, ids, planner, limit), len(ids) + limit.max_new_tokens))
    steps = 0
    while scheduler.running or scheduler.waiting:
        scheduler.step()
        steps += 1
    assert steps < sum(limit.max_new_tokens for limit in limits), "they shared forwards"
    for ids, limit, job in zip(prompts, limits, jobs, strict=True):
        assert job.result is not None
        alone = generate(Session(decoder), ids, PlainPlanner(), limit).token_ids
        assert len(job.result.token_ids) == len(alone)
        assert compare(Session(decoder), ids, alone, job.result.token_ids).kind is not Kind.ERROR
