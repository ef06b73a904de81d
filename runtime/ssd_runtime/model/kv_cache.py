"""One preallocated key-value cache a session."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

SPARE_SLOTS = 128
"""Slots beyond the tokens that a sequence will have: rows of a verification, drafts, tokens of a search."""
GROWTH = 8
"""A cache that turns out too small grows by this part of itself, and by `SPARE_SLOTS` at least."""


class KVCache:
    """Keys and values of every layer, written by slot; how many of them count is the session's affair.

    Drafts write past the committed length, verification overwrites them, rollback is a number in the session:
    nothing here is cloned, cropped or concatenated. It has the slots that were asked for, and grows where those do
    not suffice, up to `max_slots`.
    """

    def __init__(
        self, devices: Sequence[torch.device], kv_heads: int, head_dim: int, dtype: torch.dtype, max_slots: int
    ) -> None:
        self.max_slots = max_slots
        self.long = False
        """Whether what is written was rotated as in a sequence beyond the original context (longrope)."""
        self._shape = (2, kv_heads, head_dim)
        self._capacity = 0
        self._layers = [torch.empty(2, 1, kv_heads, 0, head_dim, dtype=dtype, device=device) for device in devices]

    @property
    def capacity(self) -> int:
        """Slots allocated a layer."""
        return self._capacity

    @property
    def bytes_per_slot(self) -> int:
        """Memory that one token takes over all layers."""
        two, heads, width = self._shape
        return len(self._layers) * two * heads * width * self._layers[0].element_size()

    def reserve_tokens(self, tokens: int) -> None:
        """Make room for a sequence that will have so many tokens, and for what is tried out behind it."""
        self._grow(min(tokens + SPARE_SLOTS, self.max_slots))

    def reserve(self, slots: int) -> None:
        """Make room for `slots` slots, keeping what is written. Raises ValueError beyond `max_slots`."""
        if slots > self.max_slots:
            raise ValueError(f"the cache holds at most {self.max_slots} tokens, asked for {slots}")
        if slots > self.capacity:
            more = max(self.capacity // GROWTH, SPARE_SLOTS)
            self._grow(min(max(slots, self.capacity + more), self.max_slots))

    def _grow(self, capacity: int) -> None:
        if capacity <= self.capacity:
            return
        for layer, old in enumerate(self._layers):
            grown = old.new_zeros((*old.shape[:3], capacity, old.shape[4]))
            kept = min(capacity, old.shape[3])
            grown[:, :, :, :kept] = old[:, :, :, :kept]
            self._layers[layer] = grown
        # Only now: where growing is interrupted between two layers, it has yet to be done.
        self._capacity = capacity

    def copy_from(self, other: KVCache, slots: int) -> None:
        """Take over the first `slots` slots of another cache of the same model."""
        self.reserve(slots)
        self.long = other.long
        for mine, theirs in zip(self._layers, other._layers, strict=True):
            mine[:, :, :, :slots] = theirs[:, :, :, :slots]

    def write(self, layer: int, slot: int, new: Tensor) -> None:
        """Put keys and values `new` [n, 2 * kv_heads, head_dim], keys first, into slots `slot`, …, `slot` + n - 1."""
        self._layers[layer].flatten(0, 2)[:, slot : slot + new.shape[0]] = new.transpose(0, 1)

    def move(self, source: int, target: int) -> None:
        """Put a copy of slot `source` of every layer into slot `target`."""
        for cache in self._layers:
            cache[:, :, :, target] = cache[:, :, :, source]

    def read(self, layer: int, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values of slots `begin`, …, `end` - 1, each [1, kv_heads, slots, head_dim], as views."""
        cache = self._layers[layer]
        return cache[0, :, :, begin:end], cache[1, :, :, begin:end]
