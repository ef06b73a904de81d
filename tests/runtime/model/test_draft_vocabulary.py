"""Drafts score frequent tokens and those seen lately; verification scores all, so nothing else changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from hypothesis import given
from hypothesis import strategies as st

from ssd_profiles.mask import SubLayerPlan
from ssd_runtime.drafting.early_exit import EarlyExit
from ssd_runtime.drafting.lookup import Lookup, LookupStats
from ssd_runtime.engine.loop import generate
from ssd_runtime.engine.output.output import Limits
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.model.exit_heads import ExitHeads
from ssd_runtime.model.head.draft_vocabulary import DraftVocabulary
from ssd_runtime.planning.auto.auto import AutoPlanner
from ssd_runtime.planning.makers import make_strategy
from ssd_runtime.planning.plan import ConstantPlanner, Plan
from ssd_runtime.planning.registry import read_settings
from ssd_runtime.planning.strategy import StrategyInputs
from ssd_runtime.sampling.params import SamplingParams
from ssd_runtime.sequence.session import Session
from ssd_runtime.weights.native.library import library
from tests.decoding import as_plain, plainly, speculate
from tests.gguf_files import quantised_pair
from tests.native_weights import native8
from tests.tables import latency_table

pytestmark = pytest.mark.skipif(library() is None, reason="needs AVX2 and a C compiler")
FREQUENT, SEEN = 64, 48


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """A packed model of 256 tokens, of which drafts score 64 and those seen lately."""
    packed, _, _ = quantised_pair(tmp_path_factory.mktemp("model"), "qwen3", Type.Q8_0, vocab_size=256)
    return Decoder(packed)


@given(st.lists(st.lists(st.integers(0, 300), max_size=12), max_size=6), st.sampled_from([256, 250]))
def test_what_is_scored_is_what_the_whole_head_scores(texts: list[list[int]], size: int) -> None:
    weight = native8(torch.randint(-127, 128, (size, 32), dtype=torch.int8), torch.rand(size, 1))
    vocabulary, head = DraftVocabulary(size, FREQUENT, SEEN), [weight]
    x = torch.randn(2, 32)
    whole = weight(x)
    for tokens in texts:
        vocabulary.update(tokens, answered=False)
        made = vocabulary.head(head)
        assert made is not None
        scored = made(x)
        finite = scored.isfinite().all(0)
        assert torch.equal(scored[:, finite], whole[:, finite])
        assert finite[:FREQUENT].all()
        assert int(finite.sum()) <= FREQUENT + SEEN
        for token in tokens[-1:]:
            assert token >= size or finite[token]


@torch.inference_mode()
def test_a_cap_leaves_tokens_that_are_not_scored_at_minus_infinity(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoder.head, "draft_vocabulary", DraftVocabulary(256, FREQUENT, SEEN))
    monkeypatch.setattr(decoder.head, "_cap", 5.0)
    scored = decoder.head(torch.randn(2, decoder.shape.hidden), drafting=True)
    assert (scored[:, FREQUENT:] == -torch.inf).all()
    assert (scored[:, :FREQUENT].abs() < 5.0).all()


def test_the_whole_head_serves_where_too_little_of_the_text_is_covered() -> None:
    weight = native8(torch.ones(256, 32, dtype=torch.int8), torch.ones(256, 1))
    vocabulary, head = DraftVocabulary(256, FREQUENT, SEEN), [weight]
    vocabulary.update(range(64, 256), answered=False)
    assert vocabulary.head(head) is not None
    for _ in range(3):
        vocabulary.update(range(64, 256, 16), answered=True)
    assert vocabulary.head(head) is None
    vocabulary.update([5] * 600, answered=True)
    assert vocabulary.head(head) is not None
    assert DraftVocabulary(127, FREQUENT).head(head) is None


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_output_is_plain_decodings(decoder: Decoder, temperature: float) -> None:
    drafters = [
        Plan.masked("mask", SubLayerPlan.of(4, {1, 2}), 4),
        Plan("exit", EarlyExit(ExitHeads(decoder), (2, 4), 0.01), 3),
        Plan("whole", EarlyExit(ExitHeads(decoder), (4,), 0.0), 3),
    ]
    for seed in range(6):
        ids = [(3 + 7 * seed + 5 * i) % 256 for i in range(8)]
        sampling = SamplingParams(temperature=temperature, seed=seed)
        plain = plainly(decoder, ids, 24, sampling)
        for plan in drafters:
            decoder.head.draft_vocabulary = DraftVocabulary(256, FREQUENT, SEEN)
            got = speculate(decoder, ids, plan, 24, sampling)
            assert got.token_ids == plain
            assert got.num_draft_tokens > 0


def whole_steps(decoder: Decoder, goes_on: Callable[[Sequence[int]], bool] | None = None) -> Plan:
    return Plan("whole", EarlyExit(ExitHeads(decoder), (4,), 0.0, goes_on=goes_on), 6)


def test_a_draft_of_whole_steps_is_wrong_only_where_a_token_is_not_scored(decoder: Decoder) -> None:
    """Its verification goes on from plain decoding's own states, after the last sub-layer."""
    decoder.head.draft_vocabulary = DraftVocabulary(256, FREQUENT, SEEN)
    ids = [(3 + 5 * i) % 256 for i in range(8)]
    got = as_plain(decoder, ids, whole_steps(decoder), 60)
    misses = 0
    for cycle in got.cycles[:-1]:
        assert cycle.begun
        misses += cycle.accepted < cycle.drafted
    assert 0 < misses < len(got.cycles), "the case tests something"
    decoder.head.draft_vocabulary = DraftVocabulary(256, 256, SEEN)
    assert not decoder.head.scores_partly
    got = as_plain(decoder, ids, whole_steps(decoder), 60)
    assert {cycle.accepted for cycle in got.cycles[:-1]} == {6}


def test_a_draft_ends_before_the_answer_does_and_where_it_is_told(decoder: Decoder) -> None:
    decoder.head.draft_vocabulary = DraftVocabulary(256, 256, SEEN)
    ids = [(3 + 5 * i) % 256 for i in range(8)]
    plain = plainly(decoder, ids, 40)
    end = next(token for place, token in enumerate(plain) if place > 9 and token not in plain[:place])
    limits = Limits(40, frozenset({end}))
    got = generate(Session(decoder), ids, ConstantPlanner(whole_steps(decoder)), limits)
    assert got.token_ids == plain[: plain.index(end) + 1]
    assert sum(1 + cycle.steps for cycle in got.cycles) == len(got.token_ids) - 1, "no step was for nothing"
    got = as_plain(decoder, ids, whole_steps(decoder, lambda tokens: len(tokens) < 2), 40)
    assert {cycle.drafted for cycle in got.cycles[:-1]} == {2}


def test_auto_drafts_whole_steps_where_the_head_takes_much_of_a_step(decoder: Decoder) -> None:
    """And never where a part of the head takes as long as all of it, where all is scored, or where nobody wants it."""
    table = replace(latency_table(4, per_token=1e-6), draft_head=0.1)
    for latency, assignments, size, wanted in (
        (table, [], FREQUENT, True),
        (replace(table, draft_head=1.0), [], FREQUENT, False),
        (table, [], 256, False),
        (table, ["head=0"], FREQUENT, False),
    ):
        decoder.head.draft_vocabulary = DraftVocabulary(256, size, SEEN)
        planner = make_strategy(
            StrategyInputs(
                name="auto", settings=read_settings("auto", assignments), decoder=decoder, bundle=None, latency=latency
            )
        )()
        assert isinstance(planner, AutoPlanner)
        sources, _ = planner.draft_sources(None, Lookup(LookupStats()))
        proposals = [source.propose(100, [1.0] * 9, 99.0) for source in sources]
        assert [proposal is not None for proposal in proposals] == [wanted][: len(sources)], assignments


def test_light_heads_score_all(decoder: Decoder) -> None:
    decoder.head.draft_vocabulary = DraftVocabulary(256, FREQUENT, SEEN)
    decoder.lighten("auto")
    x = decoder.embed([1])
    assert decoder.logits(x, 4, drafting=True).isfinite().all()
    assert not decoder.logits(x, drafting=True).isfinite().all()
