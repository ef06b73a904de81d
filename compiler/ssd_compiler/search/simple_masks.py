"""Masks that are rated without a search: all in the same bits, evenly skipped, or random."""

from __future__ import annotations

import random
from collections.abc import Iterator

from ssd_profiles.mask import SubLayerPlan

UNIFORM_SHARES = (0.1, 0.2, 0.3, 0.4, 0.5)
RANDOM_MASKS = 4


def uniform_masks(num_layers: int) -> Iterator[SubLayerPlan]:
    """Masks that skip several shares of the layers evenly, the first and last layer kept."""
    for share in UNIFORM_SHARES:
        yield SubLayerPlan.uniform(num_layers, max(1, round(share * (num_layers - 2))))


def with_light(masks: Iterator[SubLayerPlan], usual: SubLayerPlan) -> Iterator[SubLayerPlan]:
    """Each mask, and where the `usual` draft has light copies the same with all that it runs on these."""
    for mask in masks:
        yield mask
        if usual.light:
            yield SubLayerPlan(mask.skipped, usual.light)


def random_masks(num_layers: int, like: SubLayerPlan, seed: int) -> Iterator[SubLayerPlan]:
    """Masks of random sub-layers, as many as the mask `like` skips and with the bits of those that it runs."""
    count = len(list(like))
    picker = random.Random(seed)
    for _ in range(RANDOM_MASKS):
        yield SubLayerPlan(SubLayerPlan.of(num_layers, picker.sample(range(2 * num_layers), count)).skipped, like.light)
