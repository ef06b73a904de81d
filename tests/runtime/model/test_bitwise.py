"""`--bitwise`: a row's logits are those of a plain step, bit for bit, whatever stands beside it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Type

from ssd_profiles.errors import UserError
from ssd_profiles.mask import SubLayerPlan
from ssd_runtime.drafting.early_exit import EarlyExit
from ssd_runtime.drafting.masked import Masked
from ssd_runtime.drafting.tree import Drafter
from ssd_runtime.engine.loop import generate
from ssd_runtime.engine.output.generation import Generation
from ssd_runtime.engine.output.output import Limits
from ssd_runtime.loading.checks.bitwise import require_bitwise
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.model.exit_heads import ExitHeads
from ssd_runtime.model.sublayers.attention import attend_by_row
from ssd_runtime.model.sublayers.native_attention import NativeAttention
from ssd_runtime.model.sublayers.sublayers import KEY_BLOCK
from ssd_runtime.planning.plan import ConstantPlanner, PlainPlanner, Plan, Planner
from ssd_runtime.profiling.latency import device_key
from ssd_runtime.sequence.session import Session
from tests.decoding import strategy_of
from tests.gguf_files import quantised_pair
from tests.models import FIRST, MIXERS, tiny_model

LAYERS = 4
SERVED = [name for name in FIRST.values() if "sliding" not in name and "gemma" not in name]
WIDE = {"hidden_size": 192, "intermediate_size": 1536, "head_dim": 48, "max_position_embeddings": 2048}
"""Sizes at which kernels sum in several blocks: with tiny ones every order is the same."""


def rows_at_a_time(decoder: Decoder, ids: list[int], before: int, rows: int) -> torch.Tensor:
    session, parts = Session(decoder), list[torch.Tensor]()
    session.prefill(ids[:before])
    for begin in range(before, len(ids), rows):
        chunk = ids[begin : begin + rows]
        with torch.inference_mode():
            parts.append(decoder.logits(session.forward(chunk)))
        session.commit(chunk)
    return torch.cat(parts)


def assert_independent(decoder: Decoder, ids: list[int], before: int) -> torch.Tensor:
    """Require the same logits of any number of rows at a time; returns them."""
    plain = rows_at_a_time(decoder, ids, before, 1)
    for rows in (2, 5, 16):
        assert torch.equal(rows_at_a_time(decoder, ids, before, rows), plain), rows
    return plain


def tokens(count: int) -> list[int]:
    return [(5 + 31 * i) % 97 for i in range(count)]


@pytest.mark.parametrize("variant", SERVED)
def test_every_family_is_the_same_among_any_number_of_rows(variant: str) -> None:
    decoder = Decoder(tiny_model(variant, seed=3), bitwise=True)
    if decoder.rope_switch is None:
        require_bitwise(decoder)
    else:  # the switch lies among the probed tokens
        assert_independent(decoder, tokens(20), 4)


@pytest.mark.parametrize("before", [3, KEY_BLOCK - 9])
@pytest.mark.parametrize("variant", ["llama", "llama-no-groups"])
def test_wide_models_are_too_across_blocks_of_keys(variant: str, before: int) -> None:
    model = tiny_model(variant, seed=3, **WIDE)
    ids = tokens(before + 16)
    plain = assert_independent(Decoder(model, bitwise=True), ids, before)
    without = Decoder(model)
    near = rows_at_a_time(without, ids, before, 1)
    torch.testing.assert_close(plain, near, atol=1e-4 * float(near.abs().max()), rtol=0)
    others = [rows_at_a_time(without, ids, before, rows) for rows in (2, 16)]
    assert not all(torch.equal(other, near) for other in others), "the sizes are large enough to tell"


@pytest.mark.parametrize(("kv_heads", "groups"), [(3, 3), (4, 1), (2, 2), (1, 3)])
def test_attention_of_a_row_is_the_same_beside_any_others(kv_heads: int, groups: int) -> None:
    """With two threads, since torch's products of few queries depend on which of them computes what."""
    threads, rows, width = torch.get_num_threads(), 6, 64
    torch.manual_seed(0)
    queries = torch.randn(kv_heads * groups, rows, width)
    keys, values = torch.randn(2, 1, kv_heads, KEY_BLOCK, width)
    hidden = torch.arange(KEY_BLOCK)[None] > torch.arange(300, 300 + rows)[:, None]
    bias = torch.zeros(rows, KEY_BLOCK).masked_fill(hidden, float("-inf"))[:, None, None]

    def attended(first: int, last: int) -> torch.Tensor:
        return attend_by_row(queries[:, first:last], keys, values, bias[first:last], 0.125)

    try:
        torch.set_num_threads(2)
        for row in range(rows):
            alone = attended(row, row + 1)[:, 0]
            for first in range(row + 1):
                for last in range(row + 1, rows + 1):
                    assert torch.equal(attended(first, last)[:, row - first], alone), (row, first, last)
    finally:
        torch.set_num_threads(threads)
    grouped = queries.view(kv_heads, groups, rows, width)
    scores = (grouped @ keys[0, :, None].mT) * 0.125 + bias[:, 0, 0]
    expected = (scores.softmax(-1) @ values[0, :, None]).view(-1, rows, width)
    torch.testing.assert_close(attended(0, rows), expected)


@pytest.mark.parametrize(
    ("variant", "kind"), [("llama", Type.Q4_1), *((variant, Type.Q8_0) for variant in ("llama", *MIXERS))]
)
def test_packed_weights_are_too(variant: str, kind: Type, tmp_path: Path) -> None:
    """Hybrid models have our own attention in some layers and mixers with a state in the others."""
    require_bitwise(Decoder(quantised_pair(tmp_path, variant, kind)[0], bitwise=True))


def test_attention_that_our_own_code_serves_in_some_layers_runs_row_by_row_in_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served, of = iter([True, False, True, True] * 3), NativeAttention.of
    monkeypatch.setattr(NativeAttention, "of", lambda *given: of(*given) if next(served) else None)
    decoder = Decoder(quantised_pair(tmp_path, "llama", Type.Q8_0)[0], bitwise=True)
    assert decoder.sublayers.by_row
    require_bitwise(decoder)
    assert device_key(decoder).slug() != device_key(Decoder(decoder.model)).slug(), "it takes another time"


def assert_leaves_no_trace(decoder: Decoder, planner: Planner, new: int) -> Generation:
    """Require that after an answer the logits of the next token are those after plain decoding, bit for bit."""
    after = list[torch.Tensor]()
    for each in (PlainPlanner(), planner):
        session = Session(decoder)
        got = generate(session, tokens(9), each, Limits(new))
        with torch.inference_mode():
            after.append(decoder.logits(session.forward([1])))
        assert len(got.token_ids) == new
    assert torch.equal(*after)
    return got


@pytest.mark.parametrize(
    "drafter",
    [Masked(SubLayerPlan.of(LAYERS, {5})), Masked(SubLayerPlan.of(LAYERS, {5}), 0.0, ((0.9, 3),)), "exit", "light"],
    ids=["chain", "tree", "exit", "light"],
)
def test_drafts_of_any_kind_leave_no_trace(drafter: Drafter | str) -> None:
    decoder = Decoder(tiny_model("qwen3", seed=3, **WIDE), bitwise=True)
    if drafter == "exit":
        drafter = EarlyExit(ExitHeads(decoder), (3,), 0.0)
    elif drafter == "light":
        decoder.lighten("4")
        drafter = Masked(decoder.light.mask)
    assert not isinstance(drafter, str)
    got = assert_leaves_no_trace(decoder, ConstantPlanner(Plan("test", drafter, 6)), 40)
    assert got.num_accepted_tokens > 0
    assert all(cycle.verified == cycle.drafted + 1 for cycle in got.cycles), "no siblings"


@pytest.mark.parametrize(
    "searching",
    [("clasp", "refresh=4"), ("knapsack", "refresh=4", "window=1", "share=1"), ("swift", "window=1", "steps=9")],
    ids=lambda searching: searching[0],
)
def test_strategies_that_search_leave_no_trace_either(searching: tuple[str, ...]) -> None:
    """Their searches may look at a single token, which runs as two equal rows."""
    decoder = Decoder(tiny_model("llama", seed=3, max_position_embeddings=256), bitwise=True)
    planner = strategy_of(searching[0], decoder, *searching[1:])()
    assert assert_leaves_no_trace(decoder, planner, 60).num_draft_tokens > 0


def test_models_that_cannot_are_rejected() -> None:
    with pytest.raises(UserError, match="--bitwise: sliding windows"):
        require_bitwise(Decoder(tiny_model("mistral-sliding", seed=3), bitwise=True))
    with pytest.raises(UserError, match="raise --weight-memory"):
        require_bitwise(Decoder(tiny_model("llama", seed=3), 0, bitwise=True))


def test_a_kernel_that_does_not_hold_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lone row of some processors' kernels differs; here one does on every processor."""
    decoder = Decoder(tiny_model("llama", seed=3), bitwise=True)
    logits = Decoder.logits
    monkeypatch.setattr(Decoder, "logits", lambda self, x, *_: logits(self, x) * (1.0 if len(x) > 1 else 1.001))
    with pytest.raises(UserError, match="compute a row differently"):
        require_bitwise(decoder)


def test_a_model_that_changes_afterwards_is_noticed() -> None:
    decoder = Decoder(tiny_model("llama", seed=3), bitwise=True)
    decoder.model.model.layers[1].mlp.down_proj = torch.nn.Linear(64, 32, bias=False)
    version = decoder.version
    for _ in range(2):
        with pytest.raises(UserError, match="--bitwise: the model has changed"):
            Session(decoder)
    assert decoder.version > version, "nothing of the old weights is reused"
