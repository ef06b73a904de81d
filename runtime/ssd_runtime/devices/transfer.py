"""Copies of numbers from the host to a device, for which the host does not wait."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(values: Sequence[int] | Sequence[Sequence[int]] | Tensor, device: torch.device | str) -> Tensor:
    """A tensor of `values` on `device`.

    `torch.tensor(values, device=device)` copies too, but then waits until a card has done all work queued before.
    """
    # An empty list would make a tensor of floats, which is no index.
    numbers = values if isinstance(values, Tensor) else torch.tensor(values, dtype=torch.int64)
    return numbers.to(device, non_blocking=True)


def take_rows(x: Tensor, rows: Sequence[int]) -> Tensor:
    """A copy of some rows of `x` [n, …]."""
    if list(rows) == list(range(len(rows))):  # the first ones need no copy of their numbers
        return x[: len(rows)].clone()
    return x[to_device(rows, x.device)]
