"""`--dtype auto` takes bf16 only where it wins at every number of rows; packed bf16 copies compute the same rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from ssd_profiles.errors import UserError
from ssd_runtime.loading.dtype_choice import ROUNDS, ROWS, choice, faster_dtype, measured
from ssd_runtime.loading.models import load_model
from ssd_runtime.weights.kernels.onednn import can_serve
from ssd_runtime.weights.linear import Linear, PackedMemory
from tests.folders import save_tiny_model
from tests.models import tiny_model


def taken(bf16: tuple[float, float]) -> dict[tuple[str, int], list[float]]:
    fp32 = (0.020, 0.030)
    return {
        (name, n): [second] * ROUNDS
        for name, times in (("fp32", fp32), ("bf16", bf16))
        for n, second in zip(ROWS, times, strict=True)
    }


@pytest.mark.parametrize(
    ("bf16", "name"), [((0.01, 0.02), "bf16"), ((0.01, 0.04), "fp32"), ((0.03, 0.02), "fp32"), ((0.03, 0.04), "fp32")]
)
def test_bf16_is_chosen_only_where_it_wins_at_every_number_of_rows(bf16: tuple[float, float], name: str) -> None:
    found = choice(taken(bf16))
    assert found.name == name
    assert f"{name} decodes faster here" in str(found)


def test_a_choice_is_measured_once_if_the_machine_was_steady(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SSD_CACHE", str(tmp_path))
    calls = list[object]()

    def steady(config: object) -> dict[tuple[str, int], list[float]]:
        calls.append(config)
        return taken((0.01, 0.02))

    monkeypatch.setattr("ssd_runtime.loading.dtype_choice.measured", steady)
    config = tiny_model("llama").config
    assert faster_dtype(config) == faster_dtype(config)
    assert len(calls) == 1


def test_steps_of_a_models_sizes_are_timed_in_both_dtypes() -> None:
    times = measured(tiny_model("qwen3-sliding").config)
    assert set(times) == {(name, n) for name in ("fp32", "bf16") for n in ROWS}
    assert all(len(rounds) == ROUNDS and min(rounds) > 0 for rounds in times.values())


def test_auto_loads_the_chosen_dtype_and_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("ssd_runtime.loading.models.faster_dtype", lambda _: choice(taken((0.01, 0.02))))
    loaded = load_model(str(save_tiny_model(tmp_path / "model")), "cpu", "auto")
    assert loaded.model.dtype == torch.bfloat16
    assert [note.startswith("--dtype auto: bf16") for note in loaded.notes] == [True]
    with pytest.raises(UserError, match=r"fp32 \(float32\), bf16 \(bfloat16\), fp16 \(float16\), auto"):
        load_model(str(tmp_path / "model"), "cpu", "int3")


@pytest.mark.skipif(not can_serve(torch.zeros(1, 1, dtype=torch.bfloat16)), reason="no bf16 instructions")
@pytest.mark.parametrize("rows", [1, 5, 33])
def test_a_packed_bf16_copy_computes_the_modules_rows(rows: int) -> None:
    torch.manual_seed(0)
    modules = [nn.Linear(64, 48).bfloat16(), nn.Linear(64, 16, bias=False).bfloat16()]
    memory = PackedMemory(1 << 20)
    linear = Linear(nn.Sequential(*modules), ("0", "1"), memory)
    x = torch.randn(rows, 64).bfloat16()
    assert linear.packed
    assert memory.used == 2 * 64 * 64
    expected = torch.cat([module(x) for module in modules], -1)
    torch.testing.assert_close(linear(x), expected, atol=0.02, rtol=0.02)
