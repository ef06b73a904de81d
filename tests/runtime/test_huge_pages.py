"""Weights that move into huge pages are the same weights."""

from __future__ import annotations

import errno

import pytest
import torch

from ssd_runtime.weights.kernels.huge_pages import LEAST, LINE, HugePages
from ssd_runtime.weights.kernels.native import Native, use_huge_pages
from ssd_runtime.weights.native.library import library
from tests.native_weights import native8

pytestmark = pytest.mark.skipif(library() is None, reason="needs our own kernels")


def kernels(count: int) -> list[Native]:
    random = torch.Generator().manual_seed(3)
    levels = [torch.randint(-127, 128, (16 * (n + 1), 96), generator=random, dtype=torch.int8) for n in range(count)]
    return [native8(each, torch.rand(len(each), 3, generator=random)) for each in levels]


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


def test_memory_is_given_once_whatever_its_size() -> None:
    memory = HugePages()
    taken = [memory.take(count) for count in (1, LINE, LEAST - 2 * LINE, LEAST + 1, 0, 5)]
    for number, each in enumerate(taken):
        each.fill_(number)
    assert all((each == number).all() for number, each in enumerate(taken))
    assert [len(each) for each in taken] == [1, LINE, LEAST - 2 * LINE, LEAST + 1, 0, 5]


def test_without_room_for_huge_pages_memory_is_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, "no memory")

    monkeypatch.setattr("ssd_runtime.weights.kernels.huge_pages.mmap.mmap", full)
    assert len(HugePages().take(1000)) == 1000
