"""The one law: whatever is drafted, the output is that of plain decoding and of transformers' `generate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from ssd_profiles.errors import UserError
from ssd_profiles.mask import SubLayerPlan
from ssd_runtime.drafting.combined import Extended
from ssd_runtime.drafting.early_exit import EarlyExit
from ssd_runtime.drafting.lookup import Lookup, LookupStats, Node, Ready
from ssd_runtime.drafting.masked import Masked
from ssd_runtime.drafting.tree import Draft, Drafter
from ssd_runtime.engine.loop import generate
from ssd_runtime.engine.output.divergence import Kind, compare
from ssd_runtime.engine.output.generation import Generation
from ssd_runtime.engine.output.output import Limits
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.model.exit_heads import ExitHeads
from ssd_runtime.model.runner import Head, ModelRequest, ModelRunner, Work
from ssd_runtime.planning.plan import ConstantPlanner, PlainPlanner, Plan
from ssd_runtime.sequence.session import Session
from tests.decoding import assert_same, plainly
from tests.models import IN_BOTH, VARIANTS, VOCABULARY, tiny_model

LAYERS = 4
ALL = 2 * LAYERS
MODEL = tiny_model("qwen3", seed=5)
DECODER = Decoder(MODEL)


def speculate(decoder: Decoder, ids: list[int], plan: Plan, limits: Limits) -> Generation:
    return generate(Session(decoder), ids, ConstantPlanner(plan), limits)


def reference(model: PreTrainedModel, ids: list[int], limits: Limits) -> list[int]:
    eos = sorted(limits.eos_ids) or None
    with torch.no_grad():
        out = model.generate(
            torch.tensor([ids]), max_new_tokens=limits.max_new_tokens, do_sample=False, eos_token_id=eos
        )
    return out[0, len(ids) :].tolist()


prompts = st.lists(st.integers(1, VOCABULARY - 1), min_size=1, max_size=60)
masks = st.sets(st.integers(0, ALL - 1), max_size=ALL).map(lambda skipped: SubLayerPlan.of(LAYERS, skipped))


@settings(max_examples=40)
@given(prompts, masks, st.integers(1, 16), st.integers(1, 40), st.sampled_from([0.0, 0.05, 0.5, 1.0]), st.data())
def test_any_draft_gives_plain_decoding_and_generate(
    ids: list[int], mask: SubLayerPlan, length: int, new: int, threshold: float, data: st.DataObject
) -> None:
    limits, plain = Limits(new), plainly(DECODER, ids, new)
    if data.draw(st.booleans(), "end of sequence inside"):
        limits = Limits(new, frozenset({data.draw(st.sampled_from(plain), "eos")}))
        plain = plain[: next(i for i, token in enumerate(plain) if token in limits.eos_ids) + 1]
    got = speculate(DECODER, ids, Plan.masked("test", mask, length, threshold), limits)
    assert_same(DECODER, ids, plain, got.token_ids)
    assert_same(DECODER, ids, reference(MODEL, ids, limits), got.token_ids)
    assert sum(len(cycle.tokens) for cycle in got.cycles) == len(got.token_ids) - 1
    assert all(cycle.drafted <= length and cycle.accepted <= cycle.drafted for cycle in got.cycles)
    if not any(mask.skipped) and not threshold:
        assert got.num_accepted_tokens == got.num_draft_tokens, "a draft by the whole model is right"
    # What was drafted behind the end counts for nothing.
    assert got.num_accepted_tokens <= min(got.num_draft_tokens, len(got.token_ids) - 1)


@dataclass(frozen=True)
class Prophet:
    """Knows the output, and errs in one place of each draft; beside every token it may offer the right one."""

    prompt: int
    plain: list[int]
    wrong: int
    siblings: bool = False

    def drafting(self, session: Session, length: int) -> Work[Draft]:
        yield from ()
        known = session.committed - self.prompt + 1
        right = self.plain[known : known + length]
        tokens = list(right)
        if self.wrong < len(tokens):
            tokens[self.wrong] = (tokens[self.wrong] + 1) % VOCABULARY
        others = [[(token + 7) % VOCABULARY, token] for token in right] if self.siblings else ()
        return Draft.branching(tokens, others)


@pytest.mark.parametrize("position", [0, 1, 7, 8])
def test_a_rejection_at_each_position(position: int) -> None:
    """A draft that is right up to `position` and wrong there costs nothing but itself."""
    ids = [8, 6, 7]
    plain = plainly(DECODER, ids, 40)
    got = speculate(DECODER, ids, Plan("test", Prophet(len(ids), plain, position), 8), Limits(40))
    assert_same(DECODER, ids, plain, got.token_ids)
    assert {cycle.accepted for cycle in got.cycles[:-1]} == {min(position, 8)}


@pytest.mark.parametrize(
    ("variant", "dtype"),
    [*IN_BOTH, ("ministral3", torch.float32), *((name, torch.float16) for name in list(VARIANTS)[1::14])],
    ids=str,
)
def test_every_family_with_every_kind_of_draft(variant: str, dtype: torch.dtype) -> None:
    """Across windows, and across longrope's change of angles, where rows that left early are brought together again."""
    model = tiny_model(variant, seed=3).to(dtype)
    decoder, ids, limits = Decoder(model), list(range(3, 13)), Limits(36)
    expected = reference(model, ids, limits)
    heads = ExitHeads(decoder)
    decoder.lighten("4" if dtype == torch.float32 else "8")
    assert decoder.light.kernels
    for plan in (
        Plan.masked("mask", SubLayerPlan.of(LAYERS, {2, 5} if dtype == torch.float32 else {0, 3, 6}), 5),
        Plan.masked("light", decoder.light.mask, 5),
        Plan("exits", EarlyExit(heads, (1, 2, 3), 0.0), 5),
        Plan("unsure exits", EarlyExit(heads, (1, 2, 3), 0.15), 5),
        Plan("whole", EarlyExit(heads, (decoder.shape.num_layers,), 0.0), 5),
        Plan("siblings", Prophet(len(ids), expected, 2, siblings=True), 6),
    ):
        got = speculate(decoder, ids, plan, limits)
        assert_same(decoder, ids, expected, got.token_ids)
        assert got.num_draft_tokens > 0 or plan.reason == "unsure exits", plan.reason
    if decoder.rope_switch is None and got.token_ids == expected:
        # The chain up to the error, the right sibling in its place, and the token behind it.
        assert [len(cycle.tokens) for cycle in got.cycles[:-1]] == [4] * (len(got.cycles) - 1)


@pytest.mark.parametrize("chain", [False, True])
def test_guesses_end_before_longropes_angles_change(chain: bool) -> None:
    """Right guesses end there too, and so do guesses behind a chain."""
    decoder = Decoder(tiny_model("phi3-longrope", seed=4))
    for size in range(20, 33):
        ids = [1 + 7 * i % 90 for i in range(size)]
        expected, known = plainly(decoder, ids, 16), Lookup(LookupStats())
        known.start([*ids, *expected, *ids, expected[0]])
        guesses = Ready(tuple(Node(token, i, 0.9 ** (i + 1), i + 1) for i, token in enumerate(expected[1:9])))
        masked = Extended(Masked(SubLayerPlan.of(LAYERS, set())), 1, known, 0.9, 1.0, (1.0,) * 64, 9.0)
        got = speculate(decoder, ids, Plan("test", masked if chain else guesses, 12), Limits(16))
        assert_same(decoder, ids, expected, got.token_ids)


branchings = st.integers(2, 6).map(lambda width: ((0.4, width), (0.9, 2), (1.0, 1)))
stops = st.sets(st.integers(1, LAYERS - 1), min_size=1).map(lambda layers: tuple(sorted(layers)))
thresholds = st.sampled_from([0.0, 0.05, 0.2, 0.5, 1.0])
TREES = st.builds(Masked, masks, st.sampled_from([0.0, 0.3]), branchings)
EXITS = st.builds(EarlyExit, st.just(ExitHeads(DECODER)), stops, thresholds, st.just(0.2))


@pytest.mark.parametrize("drafters", [TREES, EXITS], ids=["trees", "exits"])
@settings(max_examples=25)
@given(data=st.data(), ids=prompts, length=st.integers(1, 12), new=st.integers(1, 40))
def test_any_tree_and_any_early_exit_give_plain_decoding(
    drafters: st.SearchStrategy[Drafter], data: st.DataObject, ids: list[int], length: int, new: int
) -> None:
    drafter = data.draw(drafters)
    got = speculate(DECODER, ids, Plan("test", drafter, length), Limits(new))
    assert_same(DECODER, ids, plainly(DECODER, ids, new), got.token_ids)
    if isinstance(drafter, EarlyExit) and drafter.threshold == 0.0:
        left = new - 2
        for cycle in got.cycles:
            assert cycle.drafted == min(length, left), "as many as there is room for"
            left -= len(cycle.tokens)


@torch.inference_mode()
def test_what_an_early_exit_has_begun_is_the_full_models_own() -> None:
    """States and keys of every drafted row, however deep each went before it was brought along."""
    session, ids = Session(DECODER), [4, 9, 2, 33]
    session.prefill(ids)
    session.pending = 17
    looks = iter([(1, 0.9), (1, 0.0), (2, 0.9), (1, 0.0), (2, 0.0), (3, 0.9), (1, 0.9), (1, 0.0), (2, 0.0), (3, 0.0)])

    class Surely(ModelRunner):
        """Answers a look after a layer by how sure the exit there is to be, forwards as they are."""

        def _together(self, requests: Sequence[ModelRequest]) -> Sequence[torch.Tensor]:
            if not isinstance(requests[0], Head):
                return super()._together(requests)
            layer, sure = next(looks)
            others = torch.full((1, VOCABULARY), (1.0 - sure) / (VOCABULARY - 1))
            others[0, layer + 20] = sure
            return [others.log()]

    draft = Surely(DECODER).finish(EarlyExit(ExitHeads(DECODER), (1, 2, 3), 0.5).drafting(session, 9))
    assert draft.tokens == [21, 22, 23, 21], "left behind layers 1, 2, 3 and 1; the last was not sure anywhere"
    assert draft.begun.first == 6
    keys = [session.cache.read(layer, 0, 9)[0].clone() for layer in range(3)]
    states = session.forward_states([17, *draft.tokens])
    torch.testing.assert_close(draft.begun.states, states[6], atol=1e-5, rtol=1e-4)
    for layer in range(3):
        torch.testing.assert_close(keys[layer], session.cache.read(layer, 0, 9)[0], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("length", [1, 63, 126, 127])
def test_prompts_up_to_the_context_limit(length: int) -> None:
    ids = [1 + i % (VOCABULARY - 1) for i in range(length)]
    got = speculate(DECODER, ids, Plan.masked("test", SubLayerPlan.of(LAYERS, {2, 5}), 6), Limits(500))
    room = 128 - length
    assert len(got.token_ids) == room
    assert_same(DECODER, ids, reference(MODEL, ids, Limits(room)), got.token_ids)


@pytest.mark.parametrize("ids", [[], [1] * 128])
def test_prompts_that_leave_no_room_are_refused(ids: list[int]) -> None:
    with pytest.raises(UserError, match="prompt"):
        plainly(DECODER, ids, 4)


def test_stop_conditions_cut_at_the_same_token() -> None:
    ids, wanted = [11, 12], plainly(DECODER, [11, 12], 30)[:7]
    limits = Limits(30, stop=lambda tokens: list(tokens) == wanted)
    assert speculate(DECODER, ids, Plan.masked("test", SubLayerPlan.of(LAYERS, {3}), 9), limits).token_ids == wanted


def test_plain_and_speculative_decoding_finish_for_the_same_reason() -> None:
    ids = list(range(1, 92))
    plain = plainly(DECODER, ids, 30)
    last = next(i for i in range(9, 30) if plain[i] not in plain[:i])
    eos = frozenset({plain[last]})
    cases = [
        (Limits(37), "length"),
        (Limits(38), "context"),
        (Limits(30, eos), "stop"),
        (Limits(last + 1, eos), "stop"),
        (Limits(last, eos), "length"),
        (Limits(37, stop=lambda tokens: len(tokens) == 37), "stop"),
    ]
    draft = Plan.masked("test", SubLayerPlan.of(LAYERS, {3}), 9)
    for limits, reason in cases:
        for planner in (PlainPlanner(), ConstantPlanner(draft)):
            assert generate(Session(DECODER), ids, planner, limits).finish_reason == reason, limits


def test_a_session_can_be_used_again_and_streams_what_it_returns() -> None:
    session, seen = Session(DECODER), list[int]()
    plan = ConstantPlanner(Plan.masked("test", SubLayerPlan.of(LAYERS, {4}), 4))
    generate(session, list(range(1, 50)), plan, Limits(20))
    again = generate(session, [2, 3], plan, Limits(20), on_tokens=seen.extend)
    assert seen == again.token_ids
    assert_same(DECODER, [2, 3], plainly(DECODER, [2, 3], 20), again.token_ids)


def test_a_wrong_output_is_told_from_a_near_tie() -> None:
    ids = [5, 6, 7]
    plain = plainly(DECODER, ids, 12)
    wrong = [*plain[:6], (plain[6] + 1) % VOCABULARY, *plain[7:]]
    for pair in ((plain, wrong), (wrong, plain)):
        found = compare(Session(DECODER), ids, *pair)
        assert (found.kind, found.position) == (Kind.ERROR, 6), "either output may be the wrong one"
        assert found.gap
    assert compare(Session(DECODER), ids, plain, plain[:-1]).kind is Kind.ERROR
    assert compare(Session(DECODER), ids, plain, list(plain)).kind is Kind.NONE
