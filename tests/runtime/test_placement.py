"""Models that accelerate has taken apart: weights that lie elsewhere, layers on several devices."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from transformers import PreTrainedModel

from ssd_profiles.mask import SubLayerPlan
from ssd_runtime.engine.loop import generate
from ssd_runtime.engine.output.output import Limits
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.planning.makers import make_strategy
from ssd_runtime.planning.plan import ConstantPlanner, PlainPlanner, Plan
from ssd_runtime.planning.registry import read_settings
from ssd_runtime.sequence.session import Session
from tests.models import tiny_model
from tests.tables import latency_table

IDS = [3, 1, 4, 1, 5]
LIMITS = Limits(40)
TAKEN_APART: dict[str, Callable[[PreTrainedModel, Path], object]] = {
    "kept on the CPU until needed": lambda model, _: cpu_offload(model, torch.device("cpu")),
    "kept on disk until needed": lambda model, folder: disk_offload(model, folder, torch.device("cpu")),
    "some layers on disk": lambda model, folder: dispatch_model(
        model,
        {
            **dict.fromkeys(("model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head"), "cpu"),
            **{f"model.layers.{layer}": "cpu" if layer < 2 else "disk" for layer in range(len(model.model.layers))},
        },
        main_device="cpu",
        offload_dir=folder,
    ),
}


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
@pytest.mark.parametrize("way", TAKEN_APART)
def test_an_offloaded_model_decodes_as_it_does_in_one_piece(way: str, family: str, tmp_path: Path) -> None:
    whole = Decoder(tiny_model(family, seed=2))
    expected = generate(Session(whole), IDS, PlainPlanner(), LIMITS).token_ids
    model = tiny_model(family, seed=2)
    TAKEN_APART[way](model, tmp_path)
    assert any(parameter.is_meta for parameter in model.parameters()), "weights are away"
    decoder = Decoder(model)
    assert decoder.device.type == "cpu"
    mask = SubLayerPlan.of(decoder.shape.num_layers, {2, 5})
    for planner in (PlainPlanner(), ConstantPlanner(Plan.masked("test", mask, 4))):
        assert generate(Session(decoder), IDS, planner, LIMITS).token_ids == expected


@pytest.mark.parametrize("name", ["auto", "clasp", "knapsack", "swift", "exit"])
def test_layers_on_other_devices_get_their_inputs_there(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One memory under three names: the code that moves runs; that nothing is left behind only a GPU can tell."""
    expected = generate(Session(Decoder(tiny_model("gemma2", seed=2))), IDS, PlainPlanner(), LIMITS).token_ids
    devices = iter([torch.device("cpu"), *[torch.device("cpu", layer % 2) for layer in range(9)]])
    monkeypatch.setattr("ssd_runtime.model.layer.device_of", lambda _: next(devices))
    decoder = Decoder(tiny_model("gemma2", seed=2))
    assert decoder._spread
    table = latency_table(decoder.shape.num_layers, per_token=1e-6)
    make = make_strategy(name, read_settings(name, []), decoder, None, table)
    assert generate(Session(decoder), IDS, make(), LIMITS).token_ids == expected


@pytest.mark.skipif(torch.cuda.device_count() < 1, reason="no CUDA device")
def test_a_model_half_on_a_gpu() -> None:
    whole = Decoder(tiny_model("llama", seed=2))
    expected = generate(Session(whole), IDS, PlainPlanner(), LIMITS).token_ids
    model = tiny_model("llama", seed=2)
    last = len(model.model.layers) - 1
    places = {f"model.layers.{layer}": "cpu" if layer < last else 0 for layer in range(last + 1)}
    ends = {"model.embed_tokens": "cpu", "model.rotary_emb": 0, "model.norm": 0, "lm_head": 0}
    # With the CPU as main device, what is put there runs there.
    dispatch_model(model, {**places, **ends}, main_device="cpu")
    decoder = Decoder(model)
    assert decoder._spread
    table = latency_table(decoder.shape.num_layers, per_token=1e-6)
    for name in ("plain", "auto", "clasp", "knapsack", "swift", "exit"):
        make = make_strategy(name, read_settings(name, []), decoder, None, table)
        assert generate(Session(decoder), IDS, make(), LIMITS).token_ids == expected
