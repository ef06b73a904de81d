"""Computes functions of a few numbers so that no bit depends on how many numbers there are."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


def exact(function: Callable[[Tensor], Tensor], numbers: Tensor) -> Tensor:
    """`function` of a few numbers, such as one per head, in fp64 and rounded to their dtype.

    torch computes what fills no vector by other code than the rest, whose last bits differ. So a row's would depend on
    the rows beside it, and weights that round rows to 8 bits magnify that to 0.4%.
    """
    return function(numbers.double()).to(numbers.dtype)
