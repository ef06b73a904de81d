"""Weights that move into huge pages are the same weights."""

from __future__ import annotations

import mmap

import pytest
import torch

from ssd_runtime.model.decoder import Decoder
from ssd_runtime.weights.kernels.huge_pages import LINE, use_huge_pages
from ssd_runtime.weights.kernels.native import Native
from ssd_runtime.weights.native.library import library
from tests.models import tiny_model

pytestmark = pytest.mark.skipif(
    library() is None or not hasattr(mmap, "MADV_HUGEPAGE"), reason="needs our own kernels, and Linux"
)


def kernels(count: int) -> list[Native]:
    random = torch.Generator().manual_seed(3)
    levels = [torch.randint(-127, 128, (16 * (n + 1), 96), generator=random, dtype=torch.int8) for n in range(count)]
    return [Native.of8(each, torch.rand(len(each), 3, generator=random)) for each in levels]


def test_products_are_the_same_to_the_bit_wherever_weights_lie() -> None:
    found, x = kernels(5), torch.randn(4, 96)
    before = [kernel(x) for kernel in found]
    use_huge_pages([*found, found[0]])
    assert all(kernel.moved for kernel in found)
    for kernel, expected in zip(found, before, strict=True):
        assert torch.equal(kernel(x), expected)
        assert kernel._blocks.data_ptr() % LINE == 0


def test_weights_move_once_and_those_that_come_later_move_alone() -> None:
    first, later = kernels(1), kernels(2)
    use_huge_pages(first)
    place = first[0]._blocks.data_ptr()
    use_huge_pages([*first, *later])
    assert first[0]._blocks.data_ptr() == place
    assert all(kernel.moved for kernel in later)


def test_a_part_that_is_in_use_outlives_the_others() -> None:
    found, x = kernels(3), torch.randn(2, 96)
    use_huge_pages(found)
    last = found.pop()
    expected = last(x)
    found.clear()
    assert torch.equal(last(x), expected)


def test_light_copies_move() -> None:
    decoder = Decoder(tiny_model("llama", hidden_size=64, intermediate_size=96, vocab_size=96))
    decoder.lighten("8")
    copies = [kernel for linear in decoder.projections for copy in linear.copies.values() for kernel in copy.kernels]
    assert copies
    assert all(copy.moved for copy in copies if isinstance(copy, Native))
