"""Planted layers are weak copies, and a model without their outputs is the given one."""

import pytest
import torch

from bench.fixtures.planted import plant
from tests.models import tiny_model

IDS = torch.tensor([[1, 2, 3, 4, 5]])


@pytest.mark.parametrize("late", [False, True])
def test_layers_without_outputs_change_nothing(late: bool) -> None:
    model = tiny_model("llama")
    layers = model.config.num_hidden_layers
    planted, mask = plant(model, 0.0, layers, late=late)
    assert planted.config.num_hidden_layers == 2 * layers
    assert len(list(mask)) == 2 * layers
    with torch.inference_mode():
        assert torch.allclose(planted(IDS).logits, model(IDS).logits, atol=1e-5)


def test_late_layers_are_at_the_end_and_copy_a_real_layer_each() -> None:
    model = tiny_model("llama")
    real = list(model.model.layers)
    planted, mask = plant(model, 0.5, len(real), late=True)
    assert list(mask) == list(range(2 * len(real), 4 * len(real)))
    for copied, weak in zip(real, planted.model.layers[len(real) :], strict=True):
        assert torch.equal(weak.mlp.down_proj.weight, 0.5 * copied.mlp.down_proj.weight)
        assert torch.equal(weak.mlp.up_proj.weight, copied.mlp.up_proj.weight)
