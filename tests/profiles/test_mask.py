from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd_profiles.mask import SkipMask

masks = st.integers(1, 40).flatmap(
    lambda layers: st.sets(st.integers(0, 2 * layers - 1)).map(lambda skipped: SkipMask.of(layers, skipped))
)


@given(masks)
def test_hex_round_trip(mask: SkipMask) -> None:
    assert SkipMask.from_hex(mask.hex(), mask.num_layers) == mask


@given(masks)
def test_counts_and_order(mask: SkipMask) -> None:
    skipped = list(mask)
    assert skipped == sorted(skipped)
    assert mask.attention_skipped + mask.mlp_skipped == len(skipped)
    assert mask.first_changed == (skipped[0] if skipped else len(mask))
    assert mask.jaccard(mask) == 1.0


def test_reads_as_layers() -> None:
    assert str(SkipMask.of(12, {6, 8, 10, 18, 9})) == "attention 3-5,9 · mlp 4"
    assert str(SkipMask.of(2)) == "attention none · mlp none"


@pytest.mark.parametrize("bad", ["1ff", "zz", "-1"])
def test_a_mask_of_other_length_is_refused(bad: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        SkipMask.from_hex(bad, 4)


def test_indices_must_exist() -> None:
    with pytest.raises(ValueError, match=r"0\.\.7"):
        SkipMask.of(4, {8})


@given(st.integers(1, 40), st.integers(0, 40), st.integers(0, 3))
def test_uniform_masks_skip_whole_layers_far_from_each_other(layers: int, count: int, protect: int) -> None:
    mask = SkipMask.uniform(layers, count, protect)
    skipped = [layer for layer in range(layers) if mask.bits[2 * layer]]
    assert all(mask.bits[2 * layer] == mask.bits[2 * layer + 1] for layer in range(layers))
    room = max(0, layers - 2 * protect)
    assert len(skipped) == min(count, room)
    assert all(protect <= layer < layers - protect for layer in skipped)
    if len(skipped) > 1:
        gaps = [b - a for a, b in pairwise(skipped)]
        assert max(gaps) - min(gaps) <= 1
        assert (skipped[0], skipped[-1]) == (protect, layers - 1 - protect)
