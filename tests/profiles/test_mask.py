from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ssd_profiles.mask import FULL, SubLayerPlan

masks = st.integers(1, 40).flatmap(
    lambda layers: st.sets(st.integers(0, 2 * layers - 1)).map(lambda skipped: SubLayerPlan.of(layers, skipped))
)
light_masks = masks.flatmap(
    lambda mask: st.lists(st.sampled_from([FULL, 8, 4]), min_size=len(mask) + 1, max_size=len(mask) + 1).map(
        lambda precisions: mask.lightened(dict(enumerate(precisions)))
    )
)


@given(masks | light_masks)
def test_hex_round_trip(mask: SubLayerPlan) -> None:
    assert SubLayerPlan.from_hex(mask.hex(), mask.num_layers) == mask
    assert ("." in mask.hex()) == bool(mask.light), "masks without precisions are written as they always were"


@given(light_masks)
def test_what_is_skipped_has_no_precision(mask: SubLayerPlan) -> None:
    """So drafts that compute the same are equal masks, and share their forwards."""
    assert mask.light == () or any(mask.light)
    assert not any(mask.bits_of(index) for index in mask)
    lit = [index for index in range(len(mask)) if mask.bits_of(index)]
    assert mask.first_changed == min([*mask, *lit], default=len(mask))
    assert mask.is_plain == (mask == SubLayerPlan.of(mask.num_layers))
    assert mask.jaccard(mask) == 1.0
    assert mask.lightened(FULL) == SubLayerPlan(mask.skipped) == SubLayerPlan.of(mask.num_layers, mask)
    assert mask.lightened(8).head_bits == 8


@pytest.mark.parametrize("bad", ["0f.0", "0f.0.0.0", "00.200.0", "00.1.1", "01.1.0", "00.x.0"])
def test_precisions_of_another_form_are_refused(bad: str) -> None:
    """Too few or many numbers, of too many bits, and two precisions for one sub-layer, as skipped and light is."""
    with pytest.raises(ValueError, match=r"."):
        SubLayerPlan.from_hex(bad, 4)


def test_precisions_read_as_layers() -> None:
    mask = SubLayerPlan.of(4, {2, 3}).lightened({0: 8, 4: 8, 6: 8, 7: 4, 8: 4})
    assert str(mask) == ("mixer 1 · mlp 1; in 8 bits: mixer 0,2-3; in 4 bits: mlp 3 · head")


def test_indices_must_exist() -> None:
    with pytest.raises(ValueError, match=r"0\.\.7"):
        SubLayerPlan.of(4, {8})


@given(st.integers(1, 40), st.integers(0, 40), st.integers(0, 3))
@example(2, 1, 1)
def test_uniform_masks_skip_whole_layers_far_from_each_other(layers: int, count: int, protect: int) -> None:
    mask = SubLayerPlan.uniform(layers, count, protect)
    skipped = [layer for layer in range(layers) if mask.skipped[2 * layer]]
    assert all(mask.skipped[2 * layer] == mask.skipped[2 * layer + 1] for layer in range(layers))
    room = max(0, layers - 2 * protect)
    assert len(skipped) == min(count, room)
    assert all(protect <= layer < layers - protect for layer in skipped)
    if len(skipped) > 1:
        gaps = [b - a for a, b in pairwise(skipped)]
        assert max(gaps) - min(gaps) <= 1
        assert (skipped[0], skipped[-1]) == (protect, layers - 1 - protect)
