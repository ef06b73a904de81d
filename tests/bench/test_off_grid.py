"""The model off the grid: noise within half a step of the grid, the same for a seed, healed by its own delta alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from bench.fixtures.off_grid import DOWN, GROUP, LEVELS, NOISE, UP, add_noise, heal, projections
from ssd_profiles.errors import UserError
from tests.models import tiny_model

SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}


def test_noise_is_of_the_size_of_rounding_to_4_bits() -> None:
    model, given = tiny_model("llama", seed=1, **SIZES), tiny_model("llama", seed=1, **SIZES)
    digest = add_noise(model)
    before = dict(projections(given))
    assert before
    for name, module in projections(model):
        groups = before[name].weight.detach().unflatten(1, (-1, GROUP))
        step = (groups.amax(-1, keepdim=True) - groups.amin(-1, keepdim=True)) / LEVELS
        noise = (module.weight.detach().unflatten(1, (-1, GROUP)) - groups) / step
        assert float(noise.abs().max()) <= 0.5 + 1e-4
        assert float(noise.std()) == pytest.approx(12**-0.5, rel=0.05)
    assert torch.equal(model.lm_head.weight, given.lm_head.weight)
    assert add_noise(given) == digest
    assert add_noise(tiny_model("llama", seed=1, **SIZES), seed=5) != digest


def test_a_delta_is_added_to_the_noise_that_it_was_fitted_to_alone(tmp_path: Path) -> None:
    model, given = tiny_model("llama", seed=1, **SIZES), dict(projections(tiny_model("llama", seed=1, **SIZES)))
    digest = add_noise(model)
    noisy = {name: module.weight.detach().clone() for name, module in projections(model)}
    factors = dict[str, torch.Tensor]()
    for name, module in projections(model):
        for end, size in ((DOWN, (2, module.in_features)), (UP, (module.out_features, 2))):
            factors |= {name + end: torch.full(size, 3, dtype=torch.int8), f"{name}{end}.scale": torch.tensor([0.5])}
    delta = tmp_path / "delta.safetensors"
    save_file(factors, delta, {NOISE: digest})
    heal(model, digest, delta)
    for name, module in projections(model):
        added = module.weight.detach() - noisy[name]
        assert torch.allclose(added, torch.full_like(added, 2 * 1.5 * 1.5), atol=1e-5)
        assert added.shape == given[name].weight.shape
    with pytest.raises(UserError, match="heals other noise"):
        heal(model, "0" * 64, delta)
