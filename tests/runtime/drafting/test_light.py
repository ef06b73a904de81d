"""Drafts on light copies of the weights: the output of plain decoding, and copies that follow the model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from ssd_profiles.latency import LatencyTable
from ssd_profiles.mask import SubLayerPlan
from ssd_runtime.drafting.lookup import Lookup
from ssd_runtime.drafting.masked import Masked
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.model.exit_heads import ExitHeads
from ssd_runtime.model.runner import Forward, Head, ModelRunner
from ssd_runtime.planning.auto.auto import AutoPlanner
from ssd_runtime.planning.auto.draft_stats import PRIOR_TOKENS
from ssd_runtime.planning.plan import Plan
from ssd_runtime.profiling.light import measure_light, with_light
from ssd_runtime.sampling.params import GREEDY, SamplingParams
from ssd_runtime.sequence.session import Session
from ssd_runtime.weights.draft_bits import DraftBits
from ssd_runtime.weights.kernels.int4 import GROUP
from ssd_runtime.weights.light import light_kernels
from tests.decoding import as_plain, assert_same, logits_of, plainly, speculate
from tests.kernels import kernel_name
from tests.light import IDS, LAYERS, drafted, lightened
from tests.models import tiny_model
from tests.streams import stream_by_the_table
from tests.tables import latency_table, with_light_costs

TABLE = latency_table(LAYERS)
WHOLE = SubLayerPlan.of(LAYERS).lightened(8)
MIXED = SubLayerPlan.of(LAYERS, {5}).lightened({0: 8, 1: 4, 2: 4, 4: 8, 7: 4, 2 * LAYERS: 8})
"""A draft that skips, runs in 8 bits, in 4 and in full, with light sub-layers before and after full ones."""


def on_grid(out: int, columns: int) -> torch.Tensor:
    """A weight of 16 levels per group, with one at either end, and scales and zeros that bf16 holds."""
    levels = torch.randint(0, 16, (out, columns // GROUP, GROUP))
    levels[..., 0], levels[..., 1] = 0, 15
    scale = (torch.rand(out, columns // GROUP, 1) + 0.5).bfloat16().float()
    return ((levels - 8) * scale).flatten(1) / 16


def test_each_sublayer_has_the_precision_of_the_mask(own: bool) -> None:
    """One sub-layer or the head changed alone: what it runs on is its copy in those bits, and nothing else's."""
    sizes = {"intermediate_size": 64, "vocab_size": 96}
    decoder = Decoder(tiny_model("llama", seed=3, **sizes))
    whole = SubLayerPlan.of(LAYERS)
    decoder.lighten("auto")
    assert decoder.light.bits == (8, 4)
    assert decoder.light.mask == whole.lightened(8)
    full = logits_of(decoder, IDS)
    for index in range(2 * LAYERS + 1):
        moved = [float((logits_of(decoder, IDS, whole.lightened({index: bits})) - full).norm()) for bits in (8, 4)]
        assert 0 < moved[0] < moved[1]
    session, runner = Session(decoder), ModelRunner(decoder)
    [states] = runner.answer([session.request(IDS, mask=whole.lightened({3: 4}), keep_states=True)])
    [known] = runner.answer([session.request(IDS, keep_states=True)])
    same = [torch.equal(one, other) for one, other in zip(states, known, strict=True)]
    assert same == [True] * 4 + [False] * (2 * LAYERS - 3)


def test_a_mask_runs_on_what_copies_there_are() -> None:
    """Sub-layers without a copy run at another bits or in full: a copy that is left out costs speed alone."""
    decoder = Decoder(tiny_model("qwen3", seed=3))
    full = logits_of(decoder, IDS)
    assert torch.equal(logits_of(decoder, IDS, MIXED.lightened(0)), logits_of(decoder, IDS, MIXED))
    assert not torch.equal(logits_of(decoder, IDS, MIXED), full)
    for bits in ("8", "4"):
        decoder.lighten(bits)  # type: ignore[arg-type]
        only = SubLayerPlan.of(LAYERS).lightened(int(bits))
        other = SubLayerPlan.of(LAYERS).lightened(12 - int(bits))
        assert torch.equal(logits_of(decoder, IDS, only), logits_of(decoder, IDS, other))
        drafted(decoder, Masked(MIXED))


@pytest.mark.parametrize(
    ("variant", "bits"), [("llama-biases", "8"), ("qwen3-sliding", "4"), ("phi3-longrope", "4"), ("gemma3", "8")]
)
def test_blocks_of_our_own_write_keys_that_verification_writes_over(variant: str, bits: DraftBits, own: bool) -> None:
    """Sizes for which attention and MLP blocks run in one call each."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "vocab_size": 96}
    if variant == "phi3-longrope":
        del sizes["head_dim"]
        sizes["num_attention_heads"] = 8
    decoder = lightened(variant, bits, **sizes)
    assert decoder.light.kernels.startswith(f"{4 * LAYERS + 1} {kernel_name(int(bits), own)}")
    got = speculate(decoder, IDS, Plan("test", Masked(decoder.light.mask), 5), 60)
    assert_same(decoder, IDS, plainly(decoder, IDS, 60), got.token_ids)
    assert got.num_accepted_tokens > 0


def test_light_drafts_with_masks_trees_and_sampling() -> None:
    """Every mask and every shape of drafts, with and without sampling."""
    decoder = lightened(bits="4")
    samplings = GREEDY, SamplingParams(0.9, top_p=0.95, repetition_penalty=1.1, seed=3)
    plain = [plainly(decoder, IDS, 60, sampling) for sampling in samplings]
    for place, mask in enumerate((decoder.light.mask, SubLayerPlan.of(LAYERS, {2, 5}).lightened(4), MIXED)):
        for shape, branching in enumerate(((), ((0.6, 3),))):
            which = (place + shape) % 2
            got = speculate(decoder, IDS, Plan("test", Masked(mask, 0.05, branching), 5), 60, samplings[which])
            assert got.token_ids == plain[which]
            assert got.num_accepted_tokens > 0


@pytest.mark.parametrize("bits", ["8", "4"])
def test_a_light_draft_is_the_model_with_rounded_weights(bits: DraftBits, own: bool) -> None:
    """Its logits are those of a model whose projections were rounded alike, not the model's own."""
    if own and bits == "8":
        pytest.skip("it rounds rows to 8 bits as well, which moves this model as much as rounding its weights does")
    sizes = {"intermediate_size": 64, "vocab_size": 96}
    decoder = lightened(bits=bits, **sizes)
    rounded = tiny_model("qwen3", seed=3, **sizes)
    for module in rounded.modules():
        if isinstance(module, nn.Linear) and module.in_features % GROUP == 0:
            [kernel] = light_kernels(module.weight.detach(), None, bits).values()
            module.weight = nn.Parameter(kernel(torch.eye(module.in_features)).T.contiguous())
    light, expected = logits_of(decoder, IDS, decoder.light.mask), logits_of(Decoder(rounded), IDS)
    full = logits_of(decoder, IDS)
    assert (light - expected).norm() < (0.7 if bits == "8" or own else 0.2) * (light - full).norm()


def test_plain_forwards_never_use_the_lighter_copies() -> None:
    decoder = Decoder(tiny_model("qwen3", seed=3))
    before = logits_of(decoder, IDS)
    decoder.lighten("4")
    assert torch.equal(logits_of(decoder, IDS), before)
    assert not torch.equal(logits_of(decoder, IDS, decoder.light.mask), before)
    request = Session(decoder).request(IDS, mask=decoder.light.mask)
    assert not request.is_full
    assert request.key != Session(decoder).request(IDS).key, "shared forwards keep them apart"
    assert Head(before, bits=4).key != Head(before).key


def test_light_drafts_of_a_model_that_rounding_leaves_alone_are_right(own: bool) -> None:
    """Weights on the grid: every draft is accepted, and `auto` takes 4 bits for them."""
    torch.manual_seed(0)
    model = tiny_model("llama", seed=3, intermediate_size=64, vocab_size=96, tie_word_embeddings=False)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.weight.copy_(on_grid(*module.weight.shape))
    decoder = Decoder(model)
    decoder.lighten("auto")
    assert decoder.light.kernels == f"{4 * LAYERS + 1} {kernel_name(4, own)}"
    got = drafted(decoder, Masked(decoder.light.mask))
    assert got.num_accepted_tokens >= 0.8 * got.num_draft_tokens
    decoder = lightened("llama", "auto", intermediate_size=64, vocab_size=96)
    every = 4 * LAYERS + 1
    kernels = ", ".join(sorted(f"{every} {kernel_name(bits, own)}" for bits in (4, 8)))
    assert decoder.light.kernels == kernels, "random weights lie on no grid"


def test_the_costs_of_lighter_copies_are_measured() -> None:
    decoder = lightened(bits="auto")
    costs, _ = measure_light(decoder)
    assert set(costs) == {8, 4}
    priced = replace(TABLE, light=costs)
    priced.check()
    assert LatencyTable.from_json(priced.to_json()).to_json() == priced.to_json()
    assert with_light(priced, decoder, "k" * 64).light.keys() == costs.keys()


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(0.7, seed=1)])
def test_auto_with_light_drafts_gives_plain_decoding(sampling: SamplingParams) -> None:
    decoder = lightened("llama", "auto", max_position_embeddings=512, vocab_size=96)
    assert decoder.light.masks == (WHOLE.lightened(8), WHOLE.lightened(4))
    stream, reasons = stream_by_the_table(), set[str]()
    for ids in ([7, 7, 9], [1, 2, 3, 4], [5, 6] * 9):
        planner = AutoPlanner(
            frontiers={},
            exits={},
            heads=ExitHeads(decoder),
            router=None,
            latency=with_light_costs(TABLE, 0.6, (8, 4)),
            stream=stream,
            light=decoder.light.masks,
        )
        got = as_plain(decoder, ids, planner, 120, sampling)
        reasons |= {cycle.plan.reason.partition(":")[0] for cycle in got.cycles}
    assert "light drafts" in reasons
    assert set(stream.light) == set(decoder.light.masks)
    predicted = [stats.predicted for stats in stream.light.values()]
    assert min(predicted) > 0
    assert any(each != PRIOR_TOKENS for each in predicted), "it learns from its cycles"


def test_auto_takes_the_bits_that_pay_in_its_stream() -> None:
    """Steps on 4 bits cost less. Once they are seldom right, those on 8 are expected to be faster."""
    eights, fours = WHOLE.lightened(8), WHOLE.lightened(4)
    stream, costs = stream_by_the_table(), [1.0 + n / 50 for n in range(20)]
    planner = AutoPlanner(
        frontiers={},
        exits={},
        heads=ExitHeads(lightened()),
        router=None,
        latency=with_light_costs(TABLE, 0.5, (8, 4)),
        stream=stream,
        light=(eights, fours),
    )
    sources, _ = planner.draft_sources(None, Lookup(stream.lookup))

    def best() -> list[float]:
        return [found.best for source in sources if (found := source.propose(100, costs, 20.0)) is not None]

    eight, four = best()
    assert four > eight > 1
    stream.light[fours].update(tokens=20, predicted=100, pace=1.0)
    eight, four = best()
    assert eight > four


def test_every_forward_of_a_light_draft_is_light() -> None:
    """Its head too, which is a fifth of a small model's weights."""
    decoder = lightened()
    session, seen = Session(decoder), list[Forward | Head]()
    answer: object = None
    session.prefill(IDS)
    session.pending = 1
    work = Masked(decoder.light.mask).drafting(session, 3)
    runner = ModelRunner(decoder)
    while True:
        try:
            request = work.send(answer)
        except StopIteration:
            break
        assert isinstance(request, Forward | Head)
        seen.append(request)
        [answer] = runner.answer([request])
    assert len(seen) == 6
    assert [request.mask for request in seen if isinstance(request, Forward)] == [decoder.light.mask] * 3
    assert [request.bits for request in seen if isinstance(request, Head)] == [8] * 3
