from __future__ import annotations

from copy import deepcopy
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from ssd_profiles.errors import UserError
from ssd_profiles.latency import LatencyTable
from ssd_runtime.loading.source import read_source
from ssd_runtime.loading.sources import find_model
from ssd_runtime.model.batch.builder import GROUPED_ROWS, bias_of
from ssd_runtime.model.cache.kv_pool import SPARE_SLOTS
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.model.sublayers.attention import attend
from ssd_runtime.profiling.kernel_choice import ROWS, fitted_decoder, measured
from ssd_runtime.profiling.latency import device_key, measure_latency
from ssd_runtime.profiling.shared_steps import CONTEXT, NONE, measure_shared_steps
from ssd_runtime.profiling.timer import Timer
from ssd_runtime.sequence.session import Session
from ssd_runtime.weights.kernels.kernel import capped
from ssd_runtime.weights.linear import Linear, PackedMemory
from tests.decoding import assert_as_transformers, plainly
from tests.models import SharedScale, tiny_model


def test_packed_projections_side_by_side_with_biases() -> None:
    modules = [nn.Linear(24, 40), nn.Linear(24, 8, bias=False)]
    linear, x = Linear(nn.Sequential(*modules), ("0", "1"), PackedMemory(1 << 20)), torch.randn(5, 24)
    expected = torch.cat([module(x) for module in modules], -1)
    assert linear.packed
    torch.testing.assert_close(linear(x), expected)
    modules[1].weight.data = torch.randn(8, 24)
    linear.refresh()
    torch.testing.assert_close(linear(x), torch.cat([module(x) for module in modules], -1))


class Switched(nn.Module):
    """Forwards the `weight` of one of two norms, as PEFT's wrapper of modules to save does."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.first, self.second, self.other = norm, deepcopy(norm), False
        self.second.weight.data.mul_(2)

    @property
    def weight(self) -> torch.Tensor:
        return (self.second if self.other else self.first).weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.second if self.other else self.first)(x)


@torch.no_grad()
def test_a_wrapped_norm_is_followed_where_it_turns() -> None:
    model, ids = tiny_model("llama"), list(range(2, 20))
    model.model.norm = wrapper = Switched(model.model.norm)
    decoder = Decoder(model)
    for wrapper.other in (False, True):
        assert_as_transformers(decoder, ids)


def test_other_weights_are_measured_by_themselves() -> None:
    """A table of a model does not serve its quantised version or one with adapters."""
    plain, served = tiny_model("llama"), list[str]()
    for scaled in (0, 1, 2):
        model = tiny_model("llama")
        for layer in model.model.layers[:scaled]:
            layer.mlp.down_proj = SharedScale(layer.mlp.down_proj)
        served.append(device_key(Decoder(model)).slug())
    assert len(set(served)) == 3
    assert served[0] == device_key(Decoder(plain)).slug()
    assert Decoder(plain).kernels == "packed"


def test_packed_copies_stay_within_their_memory() -> None:
    model = tiny_model("llama", num_hidden_layers=4)
    whole = Decoder(model)
    assert whole.kernels == "packed"
    assert Decoder(model, 0).kernels == "module"
    half = Decoder(model, whole.packed.used // 2)
    assert 0 < half.packed.used <= whole.packed.used // 2
    assert half.kernels.startswith("packed ")
    for decoder in (whole, half):
        used = decoder.packed.used
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
        decoder.refresh()
        assert decoder.packed.used == used


def test_each_number_of_rows_is_served_as_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what was measured once is known the next time."""
    model, asked = tiny_model("llama"), list[Decoder]()

    def from_four_on(decoder: Decoder) -> tuple[list[bool], bool]:
        asked.append(decoder)
        return [n >= 4 for n in ROWS], len(asked) > 1  # the machine was busy the first time

    assert fitted_decoder(model).kernels == "packed"  # too small to be measured
    monkeypatch.setattr("ssd_runtime.profiling.kernel_choice.SMALL_BYTES", 0)
    monkeypatch.setattr("ssd_runtime.profiling.kernel_choice.measured", from_four_on)
    decoder = fitted_decoder(model)
    assert decoder.kernels == "packed rows 4+"
    assert all(fitted_decoder(model).kernels == decoder.kernels for _ in range(3))
    assert len(asked) == 2
    linear, calls = decoder.layers[0].mlp.gate_up, list[int]()
    model.model.layers[0].mlp.gate_proj.register_forward_hook(lambda _, x, y: calls.append(len(y)))
    for n in (1, 3, 4, 5, 400):
        linear(torch.ones(n, model.config.hidden_size))
    assert calls == [1, 3]


def test_kernels_are_measured_on_this_machine() -> None:
    chosen, _ = measured(Decoder(tiny_model("llama")))
    assert len(chosen) == len(ROWS)


def test_the_users_model_is_not_changed() -> None:
    model = tiny_model("llama")
    before = {name: (value.data_ptr(), value.clone()) for name, value in model.state_dict().items()}
    settings = model.config.to_dict()
    plainly(Decoder(model), [1, 2, 3], 5)
    for name, value in model.state_dict().items():
        assert value.data_ptr() == before[name][0]
        assert torch.equal(value, before[name][1])
    assert model.config.to_dict() == settings


@pytest.mark.usefixtures("any_machine")
def test_a_latency_table_is_measured_within_its_model() -> None:
    decoder = Decoder(tiny_model("llama"))
    table = measure_latency(decoder)
    table.check()
    assert table.contexts[-1] == 128 - 32
    assert table.layer_kinds == ("full",) * 4
    assert table.step_seconds(50) > 0
    assert table.most_queries > table.queries[-1]
    assert table.sequences.size
    assert LatencyTable.from_json(table.to_json()).to_json() == table.to_json()
    base = table.contexts[min(1, len(table.contexts) - 1)]
    steps = [table.step_seconds(base, n) for n in table.queries]
    assert all(b >= a * (1 - 1e-9) for a, b in pairwise(steps)), "more tokens never take less time"


def test_shared_steps_are_measured_as_far_as_model_memory_and_time_allow() -> None:
    decoder = Decoder(tiny_model("llama"))
    slots = 5 * (CONTEXT + 1 + SPARE_SLOTS) * decoder.kv_layout.bytes_per_slot
    found = measure_shared_steps(decoder, 32, 10.0, slots, Timer(decoder.device))
    assert found["wide_queries"].tolist() == [48.0, 64.0, 96.0], (
        "a context of 128 holds no more beside 16 cached tokens"
    )
    assert found["sequences"].tolist() == [2.0, 4.0], "memory holds the caches of five"
    for values, least in ((found["growth"], 1.0), (found["joint"], 0.0)):
        assert values[0] >= least
        assert np.all(np.diff(values) >= 0.0)
    nothing = measure_shared_steps(decoder, 32, 0.0, slots, Timer(decoder.device))
    assert (
        nothing["wide_queries"].size
        == nothing["growth"].size
        == nothing["sequences"].size
        == nothing["joint"].size
        == 0
    )


@pytest.mark.usefixtures("any_machine")
@pytest.mark.parametrize(("pace", "budgets"), [(1e-4, 0.1), (0.05, 1.0), (0.5, 3.5)])
def test_a_device_is_measured_in_bounded_time(pace: float, budgets: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that takes `pace` seconds for any pass; the slowest one has time for a single sample of each figure."""
    taken = list[float]()
    monkeypatch.setattr("ssd_runtime.profiling.timer.seconds", lambda *_: taken.append(pace) or pace)
    monkeypatch.setattr("ssd_runtime.profiling.latency.measure_shared_steps", lambda *_, **__: NONE)
    table = measure_latency(Decoder(tiny_model("llama")), 20.0)
    table.check()
    assert sum(taken) <= budgets * 20.0


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("./nowhere", "no such folder"),
        ("/nowhere/m.gguf", "no such file"),
        ("a/b/c", "no such folder"),
        ("org/unknown", "^org/unknown: no such folder, and cannot be fetched from the Hub"),
        ("no spaces allowed", "neither a folder nor a Hub id|cannot be fetched from the Hub"),
    ],
)
def test_models_that_are_not_there(spec: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ssd_runtime.loading.sources.hub_reachable", lambda: False)
    with pytest.raises(UserError, match=says):
        find_model(spec)
    if "/nowhere" in spec:  # commands say so before imports that take seconds
        with pytest.raises(UserError, match=says):
            read_source(None, spec)


@pytest.mark.parametrize(
    ("files", "advice"),
    [
        (["config.json", "q4/model.gguf"], "download one of its .gguf files and give its path"),
        (["config.json", "pytorch_model.bin"], "convert it with save_pretrained"),
        (None, "convert it with save_pretrained"),
    ],
)
def test_a_repository_without_safetensors_is_said(
    files: list[str] | None, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def listed(name: str, revision: str | None) -> list[str]:
        if files is None:
            raise OSError("the Hub cannot be reached")
        return files

    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr("ssd_runtime.loading.sources.hub_reachable", lambda: True)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *given, **settings: str(tmp_path))
    monkeypatch.setattr("huggingface_hub.list_repo_files", listed)
    with pytest.raises(UserError, match=rf"^org/old: this repository has no safetensors weights; {advice}$"):
        find_model("org/old")


def test_a_long_prompt_goes_in_chunks_that_bound_the_memory_of_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, ids, sizes = (
        Decoder(tiny_model("gemma3", max_position_embeddings=512)),
        [1 + i % 90 for i in range(300)],
        list[int](),
    )
    whole = Session(decoder).prefill(ids)
    monkeypatch.setattr("ssd_runtime.sequence.session.MAX_BIAS_BYTES", 60_000 * 4)
    session = Session(decoder)
    request = session.request
    monkeypatch.setattr(session, "request", lambda part, **named: (sizes.append(len(part)), request(part, **named))[1])
    chunked = session.prefill(ids)
    assert sum(sizes) == len(ids)
    assert len(sizes) > 2
    assert all(32 <= size <= 117 for size in sizes[:-1])
    torch.testing.assert_close(chunked.last, whole.last)
    torch.testing.assert_close(chunked.mean, whole.mean)


@pytest.mark.parametrize("cap", [None, 5.0])
@pytest.mark.parametrize("rows", [1, 7, GROUPED_ROWS, GROUPED_ROWS + 1, 70])
def test_attention_is_the_softmax_of_its_scores(rows: int, cap: float | None) -> None:
    """However many rows there are; beyond a few, a bias takes no more memory for more query heads."""
    heads, kv_heads, keys, width = 6, 2, 90, 8
    queries, known = torch.randn(heads, rows, width), torch.randn(2, 1, kv_heads, keys, width)
    visible = torch.rand(rows, keys) < 0.6
    visible[:, 0] = True
    bias = bias_of(visible, heads // kv_heads, torch.float32)
    got = attend(queries, known[0], known[1], bias, 0.3, cap)
    each = known[:, 0].repeat_interleave(heads // kv_heads, 1)
    scores = capped(queries @ each[0].transpose(1, 2) * 0.3, cap).masked_fill(~visible, float("-inf"))
    torch.testing.assert_close(got, scores.softmax(-1) @ each[1])
    assert bias.numel() == rows * keys * (1 if rows > GROUPED_ROWS else heads // kv_heads)


@pytest.mark.parametrize("variant", ["llama", "gemma2"])
def test_chunks_of_a_prompt_are_few_enough_for_the_scores_that_are_held(
    variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ssd_runtime.sequence.session.MAX_SCORES", 1 << 21)
    decoder = Decoder(tiny_model(variant, max_position_embeddings=4096))
    session, scores, run = Session(decoder), list[int](), decoder.run

    def running(x: torch.Tensor, *given: object, **named: object) -> torch.Tensor:
        scores.append(len(x) * decoder.shape.heads * (session.committed + len(x)))
        return run(x, *given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(decoder, "run", running)
    session.prefill([5 + i % 40 for i in range(1500)])
    assert (max(scores) < 1 << 21) == (variant == "gemma2"), "a fused kernel holds none"
