"""Mixers with a state: it is that of the committed tokens, whatever was drafted, rejected or moved beside them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd_profiles.errors import UserError
from ssd_profiles.mask import SubLayerPlan
from ssd_runtime.drafting.early_exit import EarlyExit
from ssd_runtime.engine.output.output import Limits
from ssd_runtime.engine.scheduler import Scheduler
from ssd_runtime.model.cache.mixer_states import MixerStates
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.model.exit_heads import ExitHeads
from ssd_runtime.model.mixers import recurrence
from ssd_runtime.model.mixers.recurrence import CHUNK, FEW, Rows, recur, recur_apart
from ssd_runtime.planning.plan import Plan, Planner
from ssd_runtime.sequence.session import Session
from tests.card import stand_in
from tests.decoding import as_plain, logits_of, plainly, speculate, strategy_of
from tests.gguf_files import quantised_pair
from tests.models import ALIKE, HYBRIDS, SHARING, VOCABULARY, tiny_model
from tests.small_memory import small_memory
from tests.together import add

FEATURES: dict[str, tuple[str, dict[str, Any]]] = {
    "wide kernel": ("lfm2", {"conv_L_cache": 5, "conv_bias": False}),
    "one key head": ("qwen3.5", {"linear_num_key_heads": 1, "linear_conv_kernel_dim": 2, "attention_bias": True}),
    "heads of whole tiles": ("qwen3.5", {"linear_value_head_dim": 16}),
    "rotation": ("granite-hybrid", {"position_embedding_type": "rope", "mamba_n_groups": 1, "mamba_proj_bias": True}),
    "norm after the gate": ("falcon-h1", {"mamba_rms_norm": True, "mamba_norm_before_gate": False}),
    "norm before the gate": ("falcon-h1", {"mamba_rms_norm": True, "projectors_bias": True, "mlp_bias": True}),
    "bounded steps": ("granite-hybrid", {"time_step_limit": (0.9, 1.3), "mamba_conv_bias": False}),
}


@pytest.mark.parametrize("feature", FEATURES)
@torch.inference_mode()
def test_logits_equal_transformers_with_other_settings(feature: str) -> None:
    variant, changes = FEATURES[feature]
    model = tiny_model(variant, **changes)
    decoder, ids = Decoder(model), [(5 + 31 * i) % VOCABULARY for i in range(100)]
    expected, session, got = model(torch.tensor([ids])).logits[0], Session(decoder), list[torch.Tensor]()
    for size in (70, 1, 1, 4, 24):
        rows = ids[session.committed : session.committed + size]
        got.append(decoder.logits(session.forward(rows)))
        session.commit(rows)
    torch.testing.assert_close(torch.cat(got), expected, atol=1e-4 * float(expected.abs().max()), rtol=0)


def test_light_copies_are_scaled_as_the_models_weights_are() -> None:
    decoder, ids = Decoder(tiny_model("falcon-h1")), list(range(3, 43))
    decoder.lighten("8")
    whole, light = (logits_of(decoder, ids, mask) for mask in (None, decoder.light.mask))
    assert 0 < (light - whole).norm() < 0.15 * whole.norm()


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("count", [FEW + 1, CHUNK, 2 * CHUNK + 2])
def test_chunks_compute_what_rows_compute_one_by_one(count: int, delta: bool) -> None:
    torch.manual_seed(count)
    heads, key, value = 3, 5, 4
    queries, keys = (torch.nn.functional.normalize(torch.randn(count, heads, key), dim=-1) for _ in range(2))
    betas = torch.rand(count, heads) if delta else None
    rows = Rows(queries, keys, torch.randn(count, heads, value), -torch.rand(count, heads) * 0.2, betas)
    before = torch.randn(heads, key, value)
    first, kept = before.clone(), list[torch.Tensor]()
    for row in range(count):
        one = Rows(*(each if each is None else each[row : row + 1] for each in rows))  # type: ignore[arg-type]
        apart = recur_apart(first, one)
        out, first = recur(first, one)
        torch.testing.assert_close(apart, out, atol=1e-5, rtol=1e-4)
        kept.append(out)
    got, last = recur(before, rows)
    torch.testing.assert_close(got, torch.cat(kept), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(last, first, atol=1e-5, rtol=1e-4)


MIXER = Decoder(tiny_model("lfm2")).kv_layout.mixers[0]
"""A mixer whose state has every bit of its inputs, so that states are compared exactly."""
steps = st.tuples(
    st.sampled_from(["chain", "tree", "chunk", "draft", "rewind", "resume"]), st.integers(1, 40), st.integers(0, 40)
)


@settings(max_examples=60)
@given(st.lists(steps, max_size=12), st.integers(0, 20))
@torch.inference_mode()
def test_the_committed_state_is_that_of_the_committed_rows(moves: list[tuple[str, int, int]], lookback: int) -> None:
    """Rows come in chains, trees and chunks; some are accepted, others drafted, and sequences return and resume."""
    torch.manual_seed(len(moves))
    states, rows, marked = MixerStates({0: MIXER}), torch.empty(0, MIXER.width), 0
    states.lookback = lookback
    for kind, count, some in moves:
        layer, begin, accepted = states.of(0), len(rows), min(some, count)
        inputs = torch.randn(count if kind != "chunk" else 70 + count, MIXER.width)
        if kind == "chunk":
            accepted = len(inputs)
            layer.skip(begin + accepted, MIXER.scan(layer.after(begin), inputs)[1])
        if kind in ("chain", "draft"):
            layer.write(begin, inputs, MIXER.scan(layer.after(begin), inputs)[1])
        if kind == "draft":  # in two steps, the second after the state of the first
            layer.write(begin + count, inputs, MIXER.scan(layer.after(begin + count), inputs)[1])
            continue
        if kind == "tree":
            layer.write(begin, inputs, None)
            for place, row in enumerate(range(count - accepted, count)):
                states.move(begin + row, begin + place)
            inputs = inputs[count - accepted :]
        if kind == "rewind":
            states.rewind(marked) if marked else states.restart()
            rows, states.lookback = rows[:marked], lookback
        elif kind == "resume":  # what a paused sequence does: its rows come again, then what it had drafted
            layer.write(begin, inputs, None)
            saved = states.save(begin, begin + count)
            states.restart(keep_marks=True)
            searched = states.looked_back(begin)
            while states.committed < begin:
                first, again = states.committed, states.of(0)
                ends = begin, searched.start, states.next_mark(first) or begin
                last = min(end for end in ends if end > first)
                after = MIXER.scan(again.after(first), rows[first:last])[1]
                if last <= searched.start:
                    again.skip(last, after)
                else:
                    again.write(first, rows[first:last], after)
                states.settle(last)
            states.load(begin, saved)
            assert torch.equal(states.of(0).after(begin + count)[0], state_of(torch.cat([rows, inputs])))
            assert torch.equal(states.of(0).after(searched.start)[0], state_of(rows[: searched.start]))
        else:
            rows = torch.cat([rows, inputs[:accepted]])
            states.settle(len(rows))
            assert layer.tip is None or accepted == len(inputs), "the state of rejected rows is gone"
        if kind == "chain":
            marked = len(rows)
            states.mark(marked)
        assert torch.equal(states.of(0).after(len(rows))[0], state_of(rows))
        if kind == "chain" and begin and lookback:
            recent = max(marked - min(lookback, accepted), 0)
            assert torch.equal(states.of(0).after(recent)[0], state_of(rows[:recent])), "a search goes back"


@torch.inference_mode()
def test_inputs_of_a_long_forward_are_gone_once_they_are_committed() -> None:
    states = MixerStates({0: MIXER})
    states.of(0).write(0, torch.randn(300, MIXER.width), None)
    assert states.bytes > 300 * MIXER.row_bytes
    states.settle(300)
    states.of(0)
    assert states.bytes == 2 * MIXER.state_bytes


def state_of(rows: torch.Tensor) -> torch.Tensor:
    return MIXER.scan(MIXER.empty(), rows)[1][0] if len(rows) else MIXER.empty()[0]


class Anything(Planner):
    """A new plan each cycle: nothing, a chain, a tree or an early exit."""

    def __init__(self, decoder: Decoder, seed: int) -> None:
        self.random, self.heads = random.Random(seed), ExitHeads(decoder)
        self.nested = decoder.light.mask if decoder.light.bits else None

    def plan(self, context: int) -> Plan:
        kind, length = self.random.choice(["plain", "chain", "tree", "exit"]), self.random.randint(1, 7)
        some = SubLayerPlan.of(4, {i for i in range(8) if self.random.random() < 0.3})
        mask = self.nested if self.nested and self.random.random() < 0.5 else some
        if kind == "exit":
            return Plan(
                "exit",
                EarlyExit(self.heads, self.random.choice([(1, 2, 3), (4,)]), self.random.choice([0.0, 0.15])),
                length,
            )
        if kind == "plain":
            return Plan("plain")
        branching = ((0.5, 3), (1.0, 2)) if kind == "tree" else ()
        return Plan.masked(kind, mask, length, branching=branching)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("variant", [name for name in ("qwen3", *HYBRIDS, *SHARING) if name not in ALIKE])
def test_any_plans_give_plain_decoding(variant: str, packed: bool, tmp_path: Path) -> None:
    model = quantised_pair(tmp_path, variant, Type.Q8_0)[0] if packed else tiny_model(variant, seed=2)
    decoder = Decoder(model)
    decoder.lighten("4" if packed else "none")
    assert decoder.light.are_nested == packed
    got = as_plain(decoder, [3, 1, 4], Anything(decoder, 0), 50)
    assert 0 < got.num_accepted_tokens < got.num_draft_tokens


def test_a_card_decodes_what_the_processor_does() -> None:
    """No state, input or index is left on the host."""
    model = tiny_model("qwen3.5", seed=2)
    plain = plainly(Decoder(model), [3, 1, 4], 12)
    decoder = Decoder(model.to(stand_in().device))
    for planner in (Anything(decoder, 0), strategy_of("clasp", decoder)()):
        assert speculate(decoder, [3, 1, 4], planner, 12).token_ids == plain


def test_a_pool_admits_as_many_sequences_as_it_has_room_for_states() -> None:
    decoder = Decoder(tiny_model("qwen3.5"))
    layout = decoder.kv_layout
    assert layout.bytes_per_slot == layout.layer_bytes(2), "only one layer of four has keys"
    with small_memory():
        scheduler = Scheduler(decoder, 4, cache_bytes=4 * layout.state_bytes + 1000 * layout.bytes_per_slot)
        jobs, most = [add(scheduler, [first + 1, *range(2, 15)], Limits(9)) for first in range(6)], 0
        while scheduler.running or scheduler.waiting:
            scheduler.step()
            most = max(most, scheduler.running)
            states = [job.session.cache.states.bytes for job in jobs]
            assert max(states) <= layout.state_bytes, "reckoned right"
            assert scheduler.pool.used_bytes >= sum(states)
            assert sum(size > 0 for size in states) <= 2, "prefixes make room"
        assert most == 2, "half of the memory is for states"
        assert len(scheduler.prefixes) == 2
    assert all(len(job.ended().token_ids) == 9 for job in jobs)


@pytest.mark.parametrize("variant", ["qwen3.5", "gemma3"])
def test_turns_of_a_conversation_leave_nothing_behind(variant: str) -> None:
    """Each ends where the next one begins, so states and windows of earlier ones are of no use."""
    decoder, limits = Decoder(tiny_model(variant, max_position_embeddings=1024)), Limits(12)
    ids, kept = [5 + i % 40 for i in range(34)], list[int]()
    with small_memory():
        scheduler = Scheduler(decoder, 4, cache_bytes=1 << 24)
        for turn in range(12):
            got = scheduler.finish(add(scheduler, ids, limits))
            assert (got.num_cached_tokens > 0) == (turn > 0)
            latest = scheduler.prefixes._prefixes[-1].cache
            kept.append(len(latest._marks) + len(latest.states._marks))
            ids = [*ids, *got.token_ids, *(7 + turn + i for i in range(20))]
    assert max(kept[3:]) <= max(kept[:3])


def test_a_prompt_resumes_where_states_are_kept_and_nowhere_else() -> None:
    """Keys of a beginning are of no use without its states."""
    decoder, limits = Decoder(tiny_model("qwen3.5")), Limits(12)
    first = [5 + i % 40 for i in range(34)]
    asked = [(first, 0), (first[:20] + [7] * 14, 0), ([*first, 9, 8], 32), ([*first[:33], 4], 32)]
    with small_memory():
        scheduler = Scheduler(decoder, 4)
        for ids, known in asked:
            got = scheduler.finish(add(scheduler, ids, limits))
            assert got.num_cached_tokens == known
            assert got.token_ids == plainly(decoder, ids, 12)


@pytest.mark.parametrize("before", [False, True], ids=["hooked later", "hooked before"])
@torch.no_grad()
def test_a_hook_on_the_output_of_a_packed_mixer_changes_nothing_else(before: bool, tmp_path: Path) -> None:
    """Its file has the columns of that projection in another order, which the module itself restores."""
    model, ids = quantised_pair(tmp_path, "qwen3.5", Type.Q8_0)[0], list(range(5, 30))
    expected = model(torch.tensor([ids])).logits[0]
    decoder = None if before else Decoder(model)
    model.model.layers[0].linear_attn.out_proj.register_forward_hook(lambda *_: None)
    decoder = decoder or Decoder(model)
    got = logits_of(decoder, ids)
    torch.testing.assert_close(got, expected, atol=0.03 * float(expected.abs().max()), rtol=0)


@torch.inference_mode()
def test_a_mixer_beside_attention_may_be_wider_than_rows_meet_at_once(tmp_path: Path) -> None:
    """Sums over spans of its columns lie in the result before attention's is added."""
    wide = {"mamba_n_heads": 32, "mamba_d_head": 96, "mamba_d_ssm": 3072}
    model, _, dense = quantised_pair(tmp_path, "falcon-h1", Type.F16, **wide, max_position_embeddings=256)
    decoder, ids = Decoder(model), [(5 + 31 * i) % 96 for i in range(40)]
    expected = dense(torch.tensor([ids])).logits[0]
    for size in (1, 12, 40):
        session, got = Session(decoder), list[torch.Tensor]()
        for at in range(0, len(ids), size):
            got.append(decoder.logits(session.forward(ids[at : at + size])))
            session.commit(ids[at : at + size])
        assert (torch.cat(got) - expected).norm() <= 1e-4 * expected.norm(), size


def test_a_hooked_convolution_is_refused_as_often_as_it_is_met() -> None:
    model = tiny_model("lfm2")
    decoder = Decoder(model)
    next(each for each in model.modules() if isinstance(each, torch.nn.Conv1d)).register_forward_hook(lambda *_: None)
    for _ in range(2):
        with pytest.raises(UserError, match="the convolution of a conv layer is adapted, hooked"):
            decoder.refresh()


def test_no_recurrence_keeps_a_view_of_its_rows() -> None:
    """A state that were a view of a chunk would keep all of its rows in memory."""
    assert recurrence.CHUNK > recurrence.FEW
    for mixer in Decoder(tiny_model("qwen3.5")).kv_layout.mixers.values():
        _, state = mixer.scan(mixer.empty(), torch.randn(100, mixer.width))
        for part in state:
            assert part.untyped_storage().nbytes() == part.numel() * part.element_size()
