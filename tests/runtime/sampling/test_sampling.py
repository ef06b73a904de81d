"""Sampled output has the target's distribution, and with the target's own noise it is plain decoding's, too."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LogitsProcessor, SequenceBiasLogitsProcessor

from ssd_profiles.errors import UserError
from ssd_profiles.mask import SubLayerPlan
from ssd_runtime.commands.run_options import SamplingOptions
from ssd_runtime.drafting.early_exit import EarlyExit
from ssd_runtime.engine.loop import decode
from ssd_runtime.engine.output.divergence import Kind, compare
from ssd_runtime.engine.output.output import Limits
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.model.exit_heads import ExitHeads
from ssd_runtime.planning.plan import ConstantPlanner, PlainPlanner, Plan
from ssd_runtime.sampling.filters import filters_of
from ssd_runtime.sampling.params import GREEDY, SamplingParams
from ssd_runtime.sampling.processors import RowProcessors
from ssd_runtime.sampling.sampler import Sampler, draw, gumbel
from ssd_runtime.sampling.seeds import seed_generator
from ssd_runtime.sequence.session import Session
from ssd_runtime.serving.http.logits import CountPenalties
from tests.decoding import as_plain, plainly, speculate
from tests.models import VOCABULARY, tiny_model

LAYERS = 4
DECODER = Decoder(tiny_model("qwen3", seed=5))
MASK = SubLayerPlan.of(LAYERS, {2, 4, 5})
HEADS = ExitHeads(DECODER)
PLANS = {
    "chain": Plan.masked("test", MASK, 4),
    "early stop": Plan.masked("test", MASK, 6, 0.1),
    "tree": Plan.masked("test", MASK, 4, 0.05, branching=((0.1, 5), (1.0, 2))),
    "exit": Plan("test", EarlyExit(HEADS, (1, 2, 3), 0.05, 0.2), 5),
}
PENALTIES, SEEDS = st.sampled_from([1.0, 1.3]), st.integers(0, 2**32)
random_samplings = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 20]),
    top_p=st.sampled_from([1.0, 0.9, 0.3]),
    min_p=st.sampled_from([0.0, 0.05]),
    repetition_penalty=PENALTIES,
    seed=SEEDS,
)
samplings = random_samplings | st.builds(SamplingParams, repetition_penalty=PENALTIES, seed=SEEDS)


@settings(max_examples=25)
@given(st.lists(st.integers(1, VOCABULARY - 1), min_size=1, max_size=20), samplings, st.sampled_from(sorted(PLANS)))
def test_a_seed_gives_the_same_output_whatever_is_drafted(ids: list[int], sampling: SamplingParams, plan: str) -> None:
    session = Session(DECODER, sampling)
    prompt = session.prefill(ids)
    plain = decode(session, prompt, PlainPlanner(), Limits(24)).token_ids
    assert decode(session, prompt, PlainPlanner(), Limits(24)).token_ids == plain
    got = decode(session, prompt, ConstantPlanner(PLANS[plan]), Limits(24)).token_ids
    assert compare(session, ids, plain, got).kind is not Kind.ERROR
    if got == plain:
        wrong = [*plain[:5], (plain[5] + 1) % VOCABULARY, *plain[6:]]
        assert compare(session, ids, plain, wrong).kind is Kind.ERROR


@settings(max_examples=20)
@given(
    st.lists(st.integers(1, VOCABULARY - 1), min_size=1, max_size=20), random_samplings, st.sampled_from(sorted(PLANS))
)
def test_a_seed_and_a_plan_give_the_same_output_where_drafts_are_tested(
    ids: list[int], sampling: SamplingParams, plan: str
) -> None:
    session = Session(DECODER, replace(sampling, rejection=True))
    prompt = session.prefill(ids)
    once, again = (decode(session, prompt, ConstantPlanner(PLANS[plan]), Limits(24)).token_ids for _ in range(2))
    assert once == again


@pytest.mark.parametrize("rejection", [False, True])
def test_a_resumed_answer_repeats_no_random_numbers(rejection: bool) -> None:
    """Without tests of drafts it has those of the whole answer; with them it has a stream of its own."""
    sampler = Sampler(SamplingParams(1.0, seed=5, rejection=rejection))
    flat = torch.zeros(1, 1000)

    def chosen(answered: int) -> list[int]:
        sampler.restart(2, answered)
        return [sampler.choose(flat, [0] * known, lambda: [[]])(0) for known in range(2 + answered, 12)]

    whole = chosen(0)
    for answered in (1, 4):
        resumed = chosen(answered)
        assert (resumed == whole[answered:]) == (not rejection)
        assert resumed != whole[: len(resumed)]


def test_every_bit_of_a_seed_counts() -> None:
    """Seeds of 64 bits, negative ones included, have outputs of their own; small ones keep torch's stream."""
    seeds = [3, 3 + (1 << 32), 3 + (1 << 33), 3 + (1 << 62), 3 << 32, -1, (1 << 32) - 1, (1 << 63) - 1, -(1 << 63)]
    outputs = {tuple(plainly(DECODER, [3, 1], 12, SamplingParams(1.0, seed=seed))) for seed in seeds}
    assert len(outputs) == len(seeds)
    generator = torch.Generator()
    seed_generator(generator, 3)
    assert torch.equal(torch.rand(9, generator=generator), torch.rand(9, generator=torch.Generator().manual_seed(3)))


@pytest.mark.parametrize("seed", [1 << 32, 5 + (7 << 32), -2])
def test_a_wide_seed_initialises_the_twister_as_numpy_does(seed: int) -> None:
    """The state that is written into torch's generator has the layout that torch reads."""
    generator = torch.Generator()
    seed_generator(generator, seed)
    words = np.random.RandomState([seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF]).randint(0, 1 << 32, 1500, np.uint32)
    expected = torch.from_numpy((words % (1 << 24)).astype(np.float32)) / (1 << 24)
    assert torch.equal(torch.rand(1500, generator=generator), expected)


@pytest.mark.parametrize("penalty", [1.1, 2.0])
def test_a_repetition_penalty_is_that_of_generate(penalty: float) -> None:
    model, ids = tiny_model("qwen3", seed=5), [5, 9, 5, 30]
    expected = model.generate(
        torch.tensor([ids]), max_new_tokens=30, do_sample=False, repetition_penalty=penalty, eos_token_id=None
    )
    for plan in (Plan("plain"), *PLANS.values()):
        got = speculate(DECODER, ids, plan, 30, SamplingParams(repetition_penalty=penalty))
        assert got.token_ids == expected[0, len(ids) :].tolist()


@pytest.mark.parametrize("temperature", [5e-324, 1e-39, 9e-4])
def test_a_temperature_that_no_logits_can_be_divided_by_is_greedy(temperature: float) -> None:
    """Filters keep the most probable token, so that they may be given as at any other temperature."""
    cold = SamplingParams(temperature, top_p=0.9, seed=3, rejection=True)
    filters = RowProcessors(filters_of(cold), torch.empty(0, dtype=torch.long))
    expected = plainly(DECODER, [3, 1], 12)
    for sampling in (cold, replace(cold, processors=filters)):
        for plan in (Plan("plain"), *PLANS.values()):
            assert speculate(DECODER, [3, 1], plan, 12, sampling).token_ids == expected


@pytest.mark.parametrize("processor", [SequenceBiasLogitsProcessor({(7,): 100.0}), CountPenalties(2, 0.0, 50.0)])
def test_penalties_and_biases_of_a_server_shape_drafts_too(processor: LogitsProcessor) -> None:
    sampling = SamplingParams(processors=RowProcessors([processor], torch.empty(0, dtype=torch.long)))
    whole = Plan.masked("all", SubLayerPlan.of(LAYERS, set()), 4)
    got = as_plain(DECODER, [3, 1], whole, 60, sampling)
    assert got.num_accepted_tokens == got.num_draft_tokens > 40


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.6, "top_k": 40, "top_p": 0.7, "min_p": 0.02, "repetition_penalty": 1.4},
        {"temperature": 2.0, "top_p": 0.5},
        {"temperature": 1.5, "min_p": 0.2},
    ],
)
def test_processors_are_those_of_generate_in_its_order(options: dict[str, Any]) -> None:
    model, ids = tiny_model("qwen3", seed=5), [5, 9, 5, 30]
    done = model.generate(
        torch.tensor([ids]),
        **{"top_k": 0, **options},
        max_new_tokens=1,
        do_sample=True,
        eos_token_id=None,
        return_dict_in_generate=True,
        output_scores=True,
    )
    logits = DECODER.head(Session(DECODER).prefill(ids).last[None])
    got = Sampler(SamplingParams(**options))._processed(logits[0], ids, [])[1]
    torch.testing.assert_close(got, done.scores[0][0], atol=1e-4, rtol=1e-4)


def test_noise_is_gumbels_and_never_out_of_all_proportion() -> None:
    noise = gumbel((4_000_000,), torch.Generator().manual_seed(0)).double()
    assert float(noise.min()) > -3.5
    assert float(noise.max()) < 17.4, "the greatest of 2^24 equal parts"
    assert float(noise.mean()) == pytest.approx(0.5772, abs=0.003)
    assert float(noise.var()) == pytest.approx(np.pi**2 / 6, abs=0.01)


class Seen(TorchDispatchMode):
    """Records the device types and dtypes of all tensors that operations return."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: set[tuple[str, torch.dtype]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.kinds |= {(x.device.type, x.dtype) for x in tree_leaves(result) if isinstance(x, Tensor)}
        return result


def test_sampling_needs_no_float64_on_other_devices() -> None:
    """The meta device stands for mps, which has no float64."""
    sampler = Sampler(SamplingParams(0.7, top_k=5, top_p=0.9, min_p=0.01, repetition_penalty=1.2), "meta")
    with Seen() as seen:
        _, scores = sampler._processed(torch.empty(7, device="meta"), [1, 2], [3])
        noise = sampler._noise_at(2, 0, scores)
        token = draw(scores.softmax(-1)[None], sampler._generator)
    assert (noise.device.type, token.device.type) == ("meta", "meta")
    assert ("meta", torch.float32) in seen.kinds
    assert ("meta", torch.float64) not in seen.kinds


@pytest.mark.parametrize("rejection", [False, True])
def test_a_seed_draws_the_same_on_mps_as_on_a_cpu(rejection: bool) -> None:
    sampling = SamplingParams(1.0, rejection=rejection, seed=5)
    logits = torch.randn(40, 50, generator=torch.Generator().manual_seed(0))
    paths = [list(range(row)) for row in range(40)]
    choices = [Sampler(sampling, device).choose(logits, [1], lambda: paths) for device in ("cpu", "mps")]
    cpu, mps = ([choice(row) for row in range(40)] for choice in choices)
    assert cpu == mps


@pytest.mark.parametrize(
    "sampling",
    [GREEDY, SamplingParams(2.0), SamplingParams(2.0, top_k=4), SamplingParams(2.0, rejection=True)],
    ids=["greedy", "drawn", "filtered", "rejection"],
)
def test_what_is_suppressed_is_neither_chosen_nor_drafted(sampling: SamplingParams) -> None:
    logits = torch.randn(8, generator=torch.Generator().manual_seed(5))
    banned = tuple(logits.topk(3).indices.tolist())
    found = {True: set[int](), False: set[int]()}
    for seed in range(60):
        for suppresses, tokens in found.items():
            sampler = Sampler(replace(sampling, seed=seed, suppress_tokens=banned if suppresses else ()))
            tokens |= {sampler.propose(logits, [2, 3], list, 0.5).token}
            tokens |= {sampler.choose(logits[None], [2, 3], lambda: [[]])(0)}
    assert not found[True] & {*banned}
    assert banned[0] in found[False]
    assert logits.isfinite().all(), "they are the caller's"


@pytest.mark.parametrize(
    "sampling",
    [
        GREEDY,
        SamplingParams(0.8),
        SamplingParams(1.0, top_k=1),
        SamplingParams(1.3, top_k=3),
        SamplingParams(1.0, top_p=0.6),
        SamplingParams(1.5, min_p=0.3),
        SamplingParams(0.9, top_k=5, top_p=0.8, repetition_penalty=1.3),
    ],
)
def test_what_logits_nearby_choose_is_a_near_tie_and_nothing_else_is(sampling: SamplingParams) -> None:
    generator, others = torch.Generator().manual_seed(5), 0
    for seed in range(60):
        sampler = Sampler(replace(sampling, seed=seed))
        logits = torch.randn(8, generator=generator)
        choice = sampler.propose(logits, [2, 3], list).token
        for token in set(range(8)) - {choice}:
            far, near = sampler.gap(logits, [2, 3], token, 1e-5)
            assert far >= 0.0
            assert not near
            assert sampler.gap(logits, [2, 3], token, 100.0)[1]
        for reach in (0.03, 0.3, 1.0):
            moved = logits + reach * (2 * torch.rand(8, generator=generator) - 1)
            other = sampler.propose(moved, [2, 3], list).token
            others += other != choice
            # A penalty scales what has been said before.
            assert sampler.gap(logits, [2, 3], other, 2 * reach * (sampling.repetition_penalty or 1.0))[1]
    assert others > 5


def test_what_shapes_a_distribution_asks_for_sampling() -> None:
    assert SamplingOptions().params == SamplingParams()
    assert SamplingOptions(top_p=0.9, seed=7).params == SamplingParams(1.0, top_p=0.9, seed=7)
    given: dict[str, Any] = {"temperature": 0.3, "repetition_penalty": 1.1, "seed": 7, "rejection": True}
    assert SamplingOptions(**given).params == SamplingParams(**given)
    with pytest.raises(UserError, match="min_p"):
        _ = SamplingOptions(temperature=0.0, min_p=0.1).params


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -1),
        ("top_p", -0.1),
        ("top_p", 1.5),
        ("min_p", 2.0),
        ("repetition_penalty", 0.0),
    ],
)
def test_parameters_out_of_their_range_are_refused(name: str, value: float) -> None:
    with pytest.raises(UserError, match=rf"^sampling: {name}: expected .*, got "):
        SamplingParams(**{"temperature": 1.0, name: value})  # type: ignore[arg-type]


def test_a_token_that_a_filter_leaves_out_leads_once_it_is_among_the_kept() -> None:
    """With top-k, the lead over it is its distance from the lowest kept logit, or that of the first one left out."""
    plain = torch.tensor([3.0, 2.5, 1.0, 0.0])
    for top_k, expected in ((0, [0.0, 0.5, 2.0, 3.0]), (2, [0.0, 0.5, 2.0, 2.5]), (1, [0.0, 0.5, 2.0, 3.0])):
        sampler = Sampler(SamplingParams(1.0, top_k=top_k))
        _, scores = sampler._processed(plain, [], [], drafting=True)
        assert sampler._leads(plain, scores, torch.zeros(4), 0).tolist() == expected, top_k
