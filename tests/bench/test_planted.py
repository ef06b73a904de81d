"""Planted layers are weak copies, and a model without their outputs is the given one."""

import torch

from bench.fixtures.planted import plant
from tests.models import tiny_model


def test_layers_without_outputs_change_nothing() -> None:
    model, ids = tiny_model("llama"), torch.tensor([[1, 2, 3, 4, 5]])
    layers = model.config.num_hidden_layers
    planted, mask = plant(model, 0.0, layers)
    assert planted.config.num_hidden_layers == len(list(mask)) == 2 * layers
    with torch.inference_mode():
        assert torch.allclose(planted(ids).logits, model(ids).logits, atol=1e-5)
