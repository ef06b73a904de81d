"""The whole loop on a stand-in card: nothing is left on the host, and the host waits as seldom as is written here."""

from __future__ import annotations

import gc
from copy import deepcopy
from dataclasses import replace
from functools import cache
from itertools import count
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.attention.bias import causal_upper_left

from bench.fixtures.planted import plant
from ssd_profiles.mask import SubLayerPlan
from ssd_runtime import CustomGenerate, Engine, RunSettings, SamplingParams
from ssd_runtime.devices.transfer import take_rows, to_device
from ssd_runtime.drafting.on_device import STEPS_PER_READ
from ssd_runtime.engine.loop import decode
from ssd_runtime.engine.output.generation import Generation
from ssd_runtime.engine.output.output import Limits
from ssd_runtime.engine.scheduler import Scheduler
from ssd_runtime.loading.models import load_model
from ssd_runtime.model.batch.builder import bias_of
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.model.exit_heads import ExitHeads
from ssd_runtime.model.sublayers.attention import has_causal_kernel
from ssd_runtime.planning.auto.auto import AutoPlanner
from ssd_runtime.planning.cost import Entry
from ssd_runtime.planning.frontier import Frontier
from ssd_runtime.planning.papers.swift import TREE
from ssd_runtime.planning.plan import ConstantPlanner, Plan, Planner
from ssd_runtime.sampling.params import GREEDY
from ssd_runtime.sequence.session import Session
from tests.card import Counts, stand_in
from tests.decoding import assert_same, plainly, strategy_of
from tests.models import tiny_model
from tests.streams import stream_by_the_table
from tests.tables import latency_table, profile
from tests.together import add, finish

IDS = [7, 7, 9]
LIMITS = Limits(16)
SETTINGS = {
    "plain": [],
    "lookup": [],
    "auto": [],
    "knapsack": ["refresh=6", "window=3", "share=1"],
    "clasp": ["refresh=4"],
    "swift": ["window=8", "steps=60", "bayes_interval=5"],
    "exit": ["threshold=0.1", "depth=0.5", "width=3"],
    "del": ["every=1", "refresh=3", "confidence=0.1"],
}
"""Parameters with which the searches of every strategy run within few tokens, whatever the clock says."""
MOST_READS = {
    "auto with masks": 2.5,
    "masked to 0.3": 2.0,
    "masked tree": 2.5,
    "swift": 3.0,
    "clasp": 5.0,
    "knapsack": 5.0,
    "exit": 9.0,
    "del": 3.5,
}
"""Most reads per cycle of strategies that decide on the host while they draft or search."""
ONE_READ = ("plain", "lookup", "auto", "masked")
"""Strategies whose greedy cycles have one read each."""


@cache
def planted() -> tuple[Decoder, Decoder, SubLayerPlan]:
    """A planted model on the CPU and on the card, and the mask of its weak layers."""
    model, weak = plant(tiny_model("qwen3", seed=4, max_position_embeddings=512), 0.02, 4)
    return Decoder(model), Decoder(deepcopy(model).to(stand_in().device)), weak


def planner_of(name: str, decoder: Decoder) -> Planner:
    weak = planted()[2]
    if name == "masked":
        return ConstantPlanner(Plan.masked(name, weak, 4))
    if name == "masked to 0.3":
        return ConstantPlanner(Plan.masked(name, weak, 3 * STEPS_PER_READ, 0.3))
    if name == "masked tree":
        return ConstantPlanner(Plan.masked(name, weak, 4, 0.3, branching=TREE))
    if name == "auto with masks":
        table = latency_table(decoder.shape.num_layers, per_token=1e-6)
        frontiers = {"mix": Frontier((Entry("weak", weak, profile(0.95)),))}
        return AutoPlanner(frontiers, {}, ExitHeads(decoder), None, table, stream_by_the_table())
    return strategy_of(name, decoder, *SETTINGS[name])()


def decoded(name: str, decoder: Decoder, sampling: SamplingParams = GREEDY) -> tuple[Generation, Counts]:
    """Decode after a prefill; what happened on the card is counted from there on."""
    session = Session(decoder, sampling)
    prompt = session.prefill(IDS, new_tokens=LIMITS.max_new_tokens)
    with stand_in().counting() as counts:
        got = decode(session, prompt, planner_of(name, decoder), LIMITS)
    return got, counts


@pytest.mark.parametrize("rows", [[], [0, 1], [1], [2, 0]])
def test_rows_are_taken_by_numbers_of_the_host(rows: list[int]) -> None:
    x = torch.arange(6).view(3, 2)
    assert take_rows(x, rows).tolist() == [x[row].tolist() for row in rows]
    assert x[to_device(rows, x.device)].tolist() == [x[row].tolist() for row in rows]


@pytest.mark.parametrize("name", [*ONE_READ, *MOST_READS])
def test_output_is_the_cpus_and_reads_are_as_few_as_written(name: str) -> None:
    cpu, decoder, _ = planted()
    got, counts = decoded(name, decoder)
    assert got.token_ids == plainly(cpu, IDS, 16)
    assert name in ("plain", "lookup", "auto") or got.num_draft_tokens
    places = {wait: count for wait, count in counts.waits.items() if wait.kind != "synchronize"}
    assert counts.total("upload") == 0, places
    first = 1  # the token after the prompt
    if name in ONE_READ:
        assert counts.total("read") == first + len(got.cycles), places
    else:
        assert counts.total("read") <= first + MOST_READS[name] * len(got.cycles), places


@pytest.mark.parametrize("length", [0, 2])
def test_a_cycle_allocates_no_cache_and_copies_no_weights(length: int) -> None:
    """The states of three rows are smaller than any weight of the tiny model; a plain step is a draft of length 0."""
    _, decoder, weak = planted()
    weights = min(each.numel() * each.element_size() for each in decoder.model.parameters() if each.ndim == 2)
    session = Session(decoder)
    prompt = session.prefill(IDS, new_tokens=LIMITS.max_new_tokens)
    cache = min(layer.numel() * layer.element_size() for layer in session.cache.pool.storage)
    with stand_in().counting() as counts:
        decode(session, prompt, ConstantPlanner(Plan.masked("test", weak, length)), LIMITS)
    assert max(counts.allocations) < min(weights, cache)


@pytest.mark.parametrize(
    ("name", "dtype"), [("plain", torch.float16), ("masked", torch.bfloat16), ("exit", torch.bfloat16)]
)
def test_half_precision_stays_half_precision(name: str, dtype: torch.dtype) -> None:
    cpu, _, _ = planted()
    model = deepcopy(cpu.model).to(dtype)
    decoder = Decoder(deepcopy(model).to(stand_in().device))
    got, counts = decoded(name, decoder)
    assert_same(Decoder(model), IDS, plainly(Decoder(model), IDS, 16), got.token_ids)
    assert decoder.new_cache().pool.storage[0].dtype == dtype
    # Norms, and the confidence in a token, are computed in fp32; nothing with the size of a weight is.
    assert counts.widened < min(each.numel() for each in model.parameters() if each.ndim == 2)


@pytest.mark.parametrize(
    ("name", "sampling"),
    [
        ("masked", SamplingParams(0.9, top_p=0.95, repetition_penalty=1.1, seed=3)),
        ("masked tree", SamplingParams(1.0, top_k=20, seed=5)),
        ("exit", SamplingParams(1.0, top_k=20, seed=5)),
        ("lookup", SamplingParams(0.0, repetition_penalty=1.3)),
    ],
)
def test_a_seed_gives_the_cpus_output(name: str, sampling: SamplingParams) -> None:
    cpu, decoder, _ = planted()
    assert decoded(name, decoder, sampling)[0].token_ids == plainly(cpu, IDS, 16, sampling)


@pytest.mark.parametrize("name", ["plain", "masked", "clasp"])
def test_sequences_of_a_shared_step_are_read_together(name: str) -> None:
    cpu, decoder, _ = planted()
    prompts = [IDS, [1, 2, 3, 4], [5] * 9]
    scheduler = Scheduler(decoder, 3, 1 << 20)
    jobs = [add(scheduler, ids, LIMITS, planner_of(name, decoder)) for ids in prompts]
    with stand_in().counting() as counts:
        steps = finish(scheduler)
    for ids, job in zip(prompts, jobs, strict=True):
        assert job.ended().token_ids == plainly(cpu, ids, 16)
    assert counts.total("upload") == 0
    if name == "plain":
        assert counts.total("read") <= steps + len(jobs), counts.waits


def on_host() -> int:
    """Numbers in all parameters that lie on the host."""
    held = [each for each in gc.get_objects() if type(each) is torch.nn.Parameter]
    return sum(each.numel() for each in held if each.device.type == "cpu")


@pytest.mark.usefixtures("made_up_latencies")
def test_weights_are_loaded_onto_the_card_one_by_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card = stand_in()
    others = on_host()
    most = 0
    waits = count()

    def noted(kind: str) -> None:
        nonlocal most
        if next(waits) % 10 == 0:  # a look at all objects takes a while
            most = max(most, on_host())

    monkeypatch.setattr(card, "wait", noted)
    loaded = load_model(str(folder), str(card.device))
    monkeypatch.undo()
    assert {each.device.type for each in loaded.model.parameters()} == {card.device.type}
    weights = sum(each.numel() for each in loaded.model.parameters())
    assert most - others < weights / 4
    engine = Engine(loaded)
    settings = RunSettings(max_new_tokens=12, strategy="clasp")
    [outcome] = engine.generate(["The river rose"], settings)
    [expected] = Engine.open(model=str(folder), device="cpu").generate(["The river rose"], settings)
    assert outcome.generation.token_ids == expected.generation.token_ids


@pytest.mark.usefixtures("made_up_latencies")
@pytest.mark.parametrize("settings", [{}, {"repetition_penalty": 1.2}], ids=["greedy", "penalty"])
def test_generate_of_transformers_decodes_on_the_card(settings: dict[str, float]) -> None:
    """A batch with padding on the left, through logits processors."""
    model = tiny_model("qwen3", seed=4)
    ids = torch.tensor([[0, 0, 3, 1], [3, 1, 4, 1]])
    inputs = {"input_ids": ids, "attention_mask": (ids > 0).long()}
    expected = model.generate(**inputs, max_new_tokens=8, **settings)
    device = stand_in().device
    own = CustomGenerate(strategy="clasp")
    there = {name: each.to(device) for name, each in inputs.items()}
    got = model.to(device).generate(**there, max_new_tokens=8, custom_generate=own, **settings)
    assert got.device == device
    assert got.tolist() == expected.tolist()


def test_a_causal_kernel_is_used_only_if_it_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"heads": 4, "kv_heads": 2, "head_dim": 8}
    assert not has_causal_kernel(torch.device("cpu"), torch.bfloat16, **sizes), "it is not a fused one"
    monkeypatch.setattr("ssd_runtime.model.sublayers.attention.can_use_flash_attention", lambda parameters: True)
    assert has_causal_kernel(torch.device("cpu"), torch.bfloat16, **sizes)
    monkeypatch.setattr("ssd_runtime.model.sublayers.attention.causal_lower_right", causal_upper_left)
    assert not has_causal_kernel(torch.device("cpu"), torch.bfloat16, **sizes)


@pytest.mark.parametrize("place", ["cpu", "card"])
@pytest.mark.parametrize("variant", ["llama", "llama-no-groups", "qwen3-sliding", "smollm3"])
def test_attention_without_a_mask_is_attention_with_one(
    variant: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the CPU nor the stand-in has the fused kernel; torch's own substitute for it is asked the same way."""
    decoder = Decoder(tiny_model(variant, seed=4).to(stand_in().device if place == "card" else "cpu"))
    assert not decoder.batches.causal
    masked = decoded_logits(decoder)
    decoder.batches = replace(decoder.batches, causal=True)
    made = list[object]()
    monkeypatch.setattr("ssd_runtime.model.batch.builder.bias_of", lambda *given: made.append(given) or bias_of(*given))
    torch.testing.assert_close(decoded_logits(decoder), masked, atol=1e-4, rtol=1e-4)
    assert bool(made) == (variant == "qwen3-sliding"), "only windows need a mask"


@torch.inference_mode()
def decoded_logits(decoder: Decoder) -> Tensor:
    """Logits of a prompt, and of five rows after it."""
    session = Session(decoder)
    session.prefill(list(range(3, 40)))
    return decoder.logits(session.forward([9, 8, 7, 6, 5])).cpu()
