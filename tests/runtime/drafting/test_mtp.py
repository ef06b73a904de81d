"""Drafts by a model's own layer for multi-token prediction: what they are, and that no output depends on them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from copy import deepcopy
from itertools import count

import pytest
import torch
from transformers import PreTrainedModel

from ssd_profiles.errors import UserError
from ssd_profiles.mask import SubLayerPlan
from ssd_runtime.drafting.mtp import MtpChain
from ssd_runtime.engine.job import Job
from ssd_runtime.engine.loop import decode
from ssd_runtime.engine.output.generation import Generation
from ssd_runtime.engine.output.output import Limits
from ssd_runtime.engine.scheduler import Scheduler
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.model.exit_heads import ExitHeads
from ssd_runtime.planning.auto.auto import AutoPlanner
from ssd_runtime.planning.auto.draft_stats import PRIOR_TOKENS
from ssd_runtime.planning.plan import ConstantPlanner, PlainPlanner, Plan, Planner
from ssd_runtime.sampling.params import GREEDY, SamplingParams
from ssd_runtime.sequence.session import Session
from tests.card import stand_in
from tests.decoding import as_plain, plainly, speculate, strategy_of
from tests.mtp import MTP_VARIANTS, Noting, expected, with_mtp
from tests.small_memory import BLOCK, small_memory
from tests.streams import stream_by_the_table
from tests.tables import latency_table
from tests.together import add, forget_free_slots

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]


class Mixed(Planner):
    """A new plan each cycle: the layer's drafts, others that move keys, or nothing for a while."""

    def __init__(self, drafter: Noting, seed: int = 0) -> None:
        self.random, self.drafter, self.idle = random.Random(seed), drafter, 0

    def plan(self, context: int) -> Plan:
        if self.idle:
            self.idle -= 1
            return Plan("plain")
        kind = self.random.choice(["mtp", "mtp", "idle", "tree"])
        self.idle = 20 if kind == "idle" else 0
        if kind == "tree":
            mask = SubLayerPlan.of(4, {1, 4})
            return Plan.masked("tree", mask, 3, branching=((1.0, 3),))
        return Plan("plain") if self.idle else Plan("mtp", self.drafter, self.random.randint(1, 5))


def assert_of_the_layer(drafter: Noting, model: PreTrainedModel, least: int = 1, unknown: Sequence[int] = (0,)) -> None:
    """Require some drafts, each of which transformers' own layers make too."""
    assert len(drafter.drafts) >= least
    for known, tokens in drafter.drafts:
        assert tokens == expected(model, known, len(tokens), unknown)


@pytest.mark.parametrize("variant", MTP_VARIANTS[:2])
def test_drafts_are_those_of_the_layer_itself(variant: str) -> None:
    """After prompts of several chunks, after plain steps, and after drafts that were accepted, rejected or moved."""
    model, drafter = with_mtp(variant, seed=2), Noting()
    decoder = Decoder(model)
    with small_memory():
        for prompt in ([7], PROMPT, list(range(5, 65))):
            as_plain(decoder, prompt, Mixed(drafter), 60)
    assert_of_the_layer(drafter, model, least=10)


def run(scheduler: Scheduler, asked: Sequence[tuple[list[int], Planner]], new: int = 30) -> Iterator[Job[Generation]]:
    """Add requests, then yield them after each step until all are done."""
    jobs = [add(scheduler, ids, Limits(new), planner) for ids, planner in asked]
    while scheduler.running or scheduler.waiting:
        scheduler.step()
        yield jobs[-1]
    for (ids, _), job in zip(asked, jobs, strict=True):
        assert job.ended().token_ids == plainly(scheduler.decoder, ids, new)


def test_drafts_are_the_layers_after_a_pause_and_beside_others() -> None:
    """All keys are computed again, also in the middle of a draft."""
    model, drafter, paused = with_mtp("qwen3.5", seed=2), Noting(), 0
    with small_memory():
        scheduler = Scheduler(Decoder(model), 3, clock=count().__next__)  # the time for drafts is always up
        asked = [(PROMPT, Mixed(drafter)), ([7, 8], Mixed(drafter, 1)), (list(range(5, 45)), Mixed(drafter, 2))]
        for step, _ in enumerate(run(scheduler, asked)):
            if step % 9 == 8 and scheduler.running and scheduler._running[-1].decodes:
                scheduler.pause_latest()
                paused += 1
                forget_free_slots(scheduler)
    assert paused > 3
    assert_of_the_layer(drafter, model, least=10)


@pytest.mark.parametrize("ended", [False, True], ids=["running", "ended"])
def test_drafts_after_a_reused_prefix(ended: bool) -> None:
    """One state is not known: that before the first token that runs."""
    model, drafter = with_mtp("qwen3.5", seed=2), Noting()
    shared = list(range(5, 5 + 8 * BLOCK))
    with small_memory():
        scheduler = Scheduler(Decoder(model), 3)
        first = [([*shared, 3], PlainPlanner())]
        again = [([*shared, 9, 8], ConstantPlanner(Plan("mtp", drafter, 3)))]
        if ended:
            list(run(scheduler, first))
            jobs = list(run(scheduler, again))
        else:
            jobs = list(run(scheduler, [*first, *again]))
        assert jobs[-1].ended().num_cached_tokens == len(shared)
    assert_of_the_layer(drafter, model, unknown=(0, len(shared)))


@pytest.mark.parametrize("variant", MTP_VARIANTS[:2])
@pytest.mark.parametrize(
    ("dtype", "sampling"),
    [(torch.float32, GREEDY), (torch.bfloat16, GREEDY), (torch.float32, SamplingParams(0.8, top_p=0.95, seed=3))],
    ids=str,
)
def test_accepted_drafts_give_plain_decoding(variant: str, dtype: torch.dtype, sampling: SamplingParams) -> None:
    decoder = Decoder(with_mtp(variant, seed=2, agreeing=True).to(dtype))
    plain = plainly(decoder, PROMPT, 50, sampling)
    for drafter in (MtpChain(0.1), MtpChain(branching=((0.6, 2),))):
        got = speculate(decoder, PROMPT, Plan("mtp", drafter, 4), 50, sampling)
        assert got.token_ids == plain
        assert 0 < got.num_accepted_tokens < got.num_draft_tokens
        origins = [each for cycle in got.cycles for each in cycle.origins]
        assert origins.count("mtp") >= got.num_accepted_tokens


def test_a_card_drafts_what_the_processor_does() -> None:
    """The tokens of a draft stay there: the host reads once per cycle."""
    model = with_mtp("qwen3.5", seed=2, agreeing=True)
    decoders = [Decoder(model), Decoder(deepcopy(model).to(stand_in().device))]
    planner, runs = ConstantPlanner(Plan("mtp", MtpChain(), 3)), list[Generation]()
    for decoder in decoders:
        session = Session(decoder)
        prompt = session.prefill(PROMPT)
        with stand_in().counting() as counts:
            runs.append(decode(session, prompt, planner, Limits(24)))
    assert runs[0].token_ids == runs[1].token_ids
    assert runs[0].num_accepted_tokens == runs[1].num_accepted_tokens > 0
    assert counts.total("read") == 1 + len(runs[1].cycles)


def test_a_prompt_can_be_decoded_again() -> None:
    """Its beginning too, and a copy of the session."""
    model, drafter = with_mtp("qwen3.5", seed=2), Noting()
    session, planner = Session(Decoder(model)), ConstantPlanner(Plan("mtp", drafter, 3))
    prompt = session.prefill(PROMPT)
    for each in (session, session, session.fork()):
        whole = each.prefill([8, 7], prompt)
        decode(each, whole, planner, Limits(12))
        decode(each, whole, planner, Limits(12))
    assert_of_the_layer(drafter, model)


@pytest.mark.parametrize("agreeing", [True, False])
def test_auto_learns_whether_the_layer_is_worth_asking(agreeing: bool) -> None:
    decoder = Decoder(with_mtp("qwen3.5-moe", seed=2, agreeing=agreeing))
    table, stream, origins, steps = latency_table(12, per_token=1e-6), stream_by_the_table(), list[str](), 0
    for ids in (PROMPT, [7, 7, 9], [50, 40, 30]):
        planner = AutoPlanner({}, {}, ExitHeads(decoder), None, table, stream, mtp=True)
        got = as_plain(decoder, ids, planner, 70, SamplingParams(0.9, seed=1))
        origins += [each for cycle in got.cycles for each in cycle.origins]
        steps += sum(cycle.steps for cycle in got.cycles)
    assert stream.mtp.predicted != PRIOR_TOKENS, "it learns from its cycles"
    assert origins.count("mtp") > 40 if agreeing else 0 < steps < 40


def test_the_strategy_needs_the_layer() -> None:
    decoder = Decoder(with_mtp("qwen3.5", seed=2, agreeing=True))
    assert speculate(decoder, PROMPT, strategy_of("mtp", decoder, "max_draft=2")(), 9).num_accepted_tokens
    del decoder.model.mtp
    with pytest.raises(
        UserError, match=r"^--strategy mtp: this model has no layer for multi-token prediction; use auto$"
    ):
        strategy_of("mtp", Decoder(decoder.model))


@torch.no_grad()
def test_changes_of_the_layer_are_followed() -> None:
    model, drafter = with_mtp("qwen3.5", seed=2), Noting()
    decoder = Decoder(model)
    model.mtp.fc.weight.mul_(-1.0)
    model.mtp.norm.weight.add_(0.5)
    speculate(decoder, PROMPT, Plan("mtp", drafter, 3), 12)
    assert_of_the_layer(drafter, model)
