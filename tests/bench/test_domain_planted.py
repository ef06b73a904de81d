"""The ground truth for masks by domain holds: foreign layers may be skipped, own ones not."""

from __future__ import annotations

import random

import torch

from bench.fixtures.domain_planted import gate, truth
from bench.fixtures.planted import plant_at
from ssd_profiles.mask import SubLayerPlan
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.sequence.session import Session
from tests.models import tiny_model


def texts(seed: int) -> list[tuple[int, list[int]]]:
    """Two domains with words of their own."""
    draws = random.Random(seed)
    return [(domain, [draws.randint(1 + 48 * domain, 6 + 48 * domain) for _ in range(60)]) for domain in (0, 1) * 8]


@torch.inference_mode()
def test_skipping_foreign_layers_changes_less_than_skipping_own_ones() -> None:
    sources = (1, 4)
    model, weak = plant_at(
        tiny_model("llama-biases", seed=2), 1e-4, [place for s in sources for place in (s + 1, s + 2)]
    )
    told = gate(model, texts(0), sources, strength=0.3, seed=0)
    assert min(told) > 0.9
    decoder = Decoder(model)
    masks = truth(weak, sources, ("zero", "one"))
    assert set(masks["mix"]) < set(masks["zero"])
    assert set(masks["zero"]) | set(masks["one"]) == set(weak)

    def change(domain: int, mask: SubLayerPlan) -> float:
        found = []
        for own, ids in texts(1):
            if own == domain:
                whole, without = (Session(decoder).forward(ids, each) for each in (None, mask))
                found.append(torch.cosine_similarity(decoder.norm(whole), decoder.norm(without), -1).mean())
        return 1.0 - float(torch.stack(found).mean())

    for domain, (own, foreign) in enumerate((("zero", "one"), ("one", "zero"))):
        assert change(domain, masks["mix"]) < 1e-4
        assert change(domain, masks[own]) < 0.2 * change(domain, masks[foreign])
