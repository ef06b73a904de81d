"""One sequence's keys and values."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from ssd_runtime.model.cache.kv_pool import LOOKBACK, SPARE_SLOTS, KVPool, LayerGroup, Lease, sliding_slots
from ssd_runtime.model.cache.mixer_states import MixerStates

GROWTH = 8
"""A cache that is too small grows by 1 / `GROWTH` of itself, and by at least `SPARE_SLOTS`."""
Saved = tuple[dict[int, Tensor], dict[int, Tensor]]
"""The content of some slots by layer: keys and values, and the inputs of mixers that are no attention."""


class KVCache:
    """Keys and values of one sequence in every layer, by slot: slot i is for position i, or for a row of a tree.

    The session knows how many slots are committed. Drafts write after these and verification overwrites them, so
    rollback is a number in the session. Layers with a sliding window keep the keys that later rows can see, and
    `lookback` tokens more. `mark` names further positions that a session may return to. Layers whose mixer is no
    attention have no keys but `states`, and those that share another layer's keys have none either.
    """

    def __init__(self, pool: KVPool) -> None:
        self.pool = pool
        self.long = False
        """Whether keys are rotated by the angles of sequences beyond the original context (longrope)."""
        self.lookback = LOOKBACK
        self.leases = [Lease() for _ in pool.groups]
        """One lease per layer group."""
        self._shift = [0] * len(pool.layout.devices)
        """Offset per layer from a slot to its place in the pool."""
        self._reach = 0
        """The slot after the last that every layer has."""
        self.states = MixerStates(pool.layout.mixers)
        self._keyed = [layer for group in pool.groups for layer in group.layers]
        self._marks: dict[int, dict[int, Tensor] | None] = {}
        """Positions to return to. Once a sliding layer has dropped a part of the window before one, it has copies of
        the windows of all sliding layers."""
        pool.admit(self)

    @property
    def bytes(self) -> int:
        """Bytes that the sequence takes."""
        leased = sum(lease.size * group.slot_bytes for lease, group in zip(self.leases, self.pool.groups, strict=True))
        kept = sum(
            each.numel() * each.element_size() for saved in self._marks.values() for each in (saved or {}).values()
        )
        return leased + kept + self.states.bytes

    def reserve_tokens(self, tokens: int) -> None:
        """Reserve slots for a sequence of `tokens` tokens, and spare ones after it."""
        slots = min(tokens + SPARE_SLOTS, self.pool.layout.max_slots)
        for number, group in enumerate(self.pool.groups):
            self._grow(number, self.pool.slots_for(group, slots))

    def reserve(self, slots: int, committed: int = 0) -> None:
        """Reserve `slots` slots, and as many more as attention may read with them.

        Sliding layers drop the keys that no row from position `committed` on can see. Raises ValueError beyond the
        layout's `max_slots`, and PoolFull if the pool has no more.
        """
        slots += self.pool.layout.key_multiple - 1
        if slots <= self._reach:
            return
        most = self.pool.layout.max_slots
        if slots > most:
            raise ValueError(f"the cache holds at most {most} tokens, asked for {slots}")
        for number, (lease, group) in enumerate(zip(self.leases, self.pool.groups, strict=True)):
            if slots > lease.reach and group.window is not None and lease.size >= sliding_slots(group.window):
                self._slide(number, committed)
            if slots > lease.reach:
                more = max(slots - lease.reach, lease.size // GROWTH, SPARE_SLOTS)
                self._grow(number, min(lease.size + more, most - lease.first))

    def mark(self, position: int) -> None:
        """Let the session return to `position` tokens at any time; with states, before it has committed more."""
        self._marks.setdefault(position)
        self.states.mark(position)

    def forget_marks(self, spared: Collection[int]) -> None:
        """Forget all marked positions but `spared`, with the windows and states that are kept for them."""
        self._marks = {mark: saved for mark, saved in self._marks.items() if mark in spared}
        self.states.forget_marks(spared)

    def holds(self, tokens: int) -> bool:
        """Whether it has slots for the keys of `tokens` tokens; it has none after `release`."""
        return all(lease.reach >= tokens for lease in self.leases)

    def resumable(self, position: int) -> bool:
        """Whether decoding can resume after the first `position` tokens.

        Sliding layers have the window before that, and other mixers their states.
        """
        if not self.states.resumable(position):
            return False
        return self._marks.get(position) is not None or all(
            lease.first <= _window_begin(group, position)
            for lease, group in zip(self.leases, self.pool.groups, strict=True)
        )

    def rewind(self, position: int) -> None:
        """Return to `position` tokens, which must be resumable; from there on `lookback` is as at first."""
        self.lookback = LOOKBACK
        self._restore(position)
        self.states.rewind(position)
        self._marks = {mark: saved for mark, saved in self._marks.items() if mark <= position}

    def restart(self, keep_marks: bool = False) -> None:
        """Return to no tokens at all.

        With `keep_marks`, the same tokens are written again: marked positions stay marked, and `lookback` stays.
        """
        if not keep_marks:
            self.lookback = LOOKBACK
        for number, lease in enumerate(self.leases):
            lease.first = 0
            self.placed(number)
        self._marks = dict.fromkeys(self._marks if keep_marks else ())
        self.states.restart(keep_marks)

    def copy_from(self, other: KVCache, position: int) -> None:
        """Copy the first `position` tokens, which must be resumable, of another cache of the same model."""
        self.long = other.long
        windows = other._marks.get(position) or {}
        for number, (mine, theirs, group) in enumerate(zip(self.leases, other.leases, self.pool.groups, strict=True)):
            begin = _window_begin(group, position)
            count = position - begin
            mine.first = begin
            self.placed(number)
            self._grow(number, self.pool.slots_for(group, count + SPARE_SLOTS))
            dropped = theirs.first > begin
            for layer in group.layers:
                kept = windows[layer] if dropped else other._part(layer, begin, count)
                self._part(layer, begin, count).copy_(kept)
        if windows:
            self._marks[position] = windows
        self.states.copy_from(other.states, position)

    def release(self) -> None:
        """Give all slots back to the pool; nothing may be written any more."""
        self.pool.give_back(self.leases)
        self._marks = dict.fromkeys(self._marks)
        self.states.restart(keep_marks=True)
        for number in range(len(self.leases)):
            self.placed(number)

    def trim(self, slots: int) -> None:
        """Give back the slots from `slots` on, and all states but the marked ones."""
        self.states.trim()
        for number, lease in enumerate(self.leases):
            size = min(lease.size, max(0, slots - lease.first))
            self.pool.resize(number, lease, size)
            self.placed(number)

    def save(self, begin: int, end: int) -> Saved:
        """A copy of what slots `begin`, …, `end` - 1 hold, for `load`."""
        keys = {layer: self._part(layer, begin, end - begin).clone() for layer in self._keyed}
        return keys, self.states.save(begin, end)

    def load(self, begin: int, saved: Saved) -> None:
        """Write a copy of `save` to slots `begin`, …"""
        keys, inputs = saved
        for layer, slots in keys.items():
            self._part(layer, begin, slots.shape[3]).copy_(slots)
        self.states.load(begin, inputs)

    def write(self, layer: int, slot: int | Tensor, new: Tensor) -> None:
        """Put keys and values `new` [n, 2 * kv_heads, head_dim], keys first, into slots `slot`, …, `slot` + n - 1.

        `slot` may be the slots of all rows [n] on the device instead.
        """
        at = slot + self._shift[layer]
        slots = self.pool.storage[layer].flatten(0, 2)
        if self.pool.layout.quantised:
            new = quantised_slots(new)
        if isinstance(at, int):
            slots[:, at : at + new.shape[0]] = new.transpose(0, 1)
        else:
            slots.index_copy_(1, at, new.transpose(0, 1))

    def move(self, source: int, target: int) -> None:
        """Put a copy of slot `source` of every layer into slot `target`."""
        for layer in self._keyed:
            slots = self.pool.storage[layer]
            shift = self._shift[layer]
            slots[:, :, :, target + shift] = slots[:, :, :, source + shift]
        self.states.move(source, target)

    def read(self, layer: int, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values of slots `begin`, …, `end` - 1, each [1, kv_heads, slots, head_dim].

        They are views, unless the pool is quantised.
        """
        slots = self._part(layer, begin, end - begin)
        if self.pool.layout.quantised:
            slots = dequantised_slots(slots)
        return slots[0], slots[1]

    def address(self, layer: int, slot: int) -> tuple[int, int, int, int, int]:
        """Addresses of the first head's key and value in `slot`, and how far memory reaches from there.

        That is the bytes to the end of all keys, the number of slots to the end of a head's, and the distance between
        heads in bytes.
        """
        slots = self.pool.storage[layer]
        both, _, stride, width, _ = slots.stride()
        size = slots.element_size()
        at = slot + self._shift[layer]
        first = slots.data_ptr() + at * width * size
        return first, first + both * size, (both - at * width) * size, stride // width - at, stride * size

    def placed(self, number: int) -> None:
        """Update offsets and reach after a change of lease `number`."""
        lease = self.leases[number]
        for layer in self.pool.groups[number].layers:
            self._shift[layer] = lease.begin - lease.first
        self._reach = min(each.reach for each in self.leases)

    def _part(self, layer: int, begin: int, count: int) -> Tensor:
        """The slots `begin`, …, `begin` + count - 1 of a layer [2, 1, kv_heads, count, width], as a view."""
        at = begin + self._shift[layer]
        return self.pool.storage[layer][:, :, :, at : at + count]

    def _grow(self, number: int, size: int) -> None:
        lease = self.leases[number]
        if size > lease.size:
            self.pool.resize(number, lease, size)
            self.placed(number)

    def _slide(self, number: int, committed: int) -> None:
        """Drop the positions of a sliding layer group that no row from position `committed` on can see.

        The windows before marked positions are copied first.
        """
        lease = self.leases[number]
        group = self.pool.groups[number]
        first = max(0, _window_begin(group, committed) - self.lookback)
        dropped = first - lease.first
        if dropped < SPARE_SLOTS:  # keys would soon be moved again, so the lease grows instead
            return
        for position, saved in self._marks.items():
            if position <= committed and _window_begin(group, position) < first and not saved:
                self._marks[position] = self._windows(position)
        kept = lease.size - dropped
        for layer in group.layers:
            slots = self._part(layer, first, kept)
            # The new place may overlap the old one.
            self._part(layer, lease.first, kept).copy_(slots.clone() if dropped < kept else slots)
        lease.first = first
        self.placed(number)

    def _restore(self, position: int) -> None:
        """Restore the windows before a marked position in the sliding layers that have dropped them."""
        windows = self._marks.get(position) or {}
        for number, (lease, group) in enumerate(zip(self.leases, self.pool.groups, strict=True)):
            begin = _window_begin(group, position)
            if lease.first <= begin:
                continue
            lease.first = begin
            self.placed(number)
            for layer in group.layers:
                self._part(layer, begin, position - begin).copy_(windows[layer])

    def _windows(self, position: int) -> dict[int, Tensor]:
        """Copies of the windows before a position, by sliding layer."""
        return {
            layer: self._part(layer, begin, position - begin).clone()
            for group in self.pool.groups
            if group.window is not None
            for begin in [_window_begin(group, position)]
            for layer in group.layers
        }


def quantised_slots(rows: Tensor) -> Tensor:
    """Rows [..., n] in fp32 as [..., n + 4] int8: whole numbers up to 127, then the bytes of their scale in fp32."""
    peaks = rows.abs().amax(-1, keepdim=True)
    levels = (rows * (127 / peaks).nan_to_num(posinf=0.0)).round().to(torch.int8)
    return torch.cat([levels, (peaks / 127).view(torch.int8)], -1)


def dequantised_slots(slots: Tensor) -> Tensor:
    """Rows [..., n] in fp32 from the slots [..., n + 4] of `quantised_slots`, up to half a scale."""
    size = slots.shape[-1] - torch.float32.itemsize
    return slots[..., :size].float() * slots[..., size:].contiguous().view(torch.float32)


def _window_begin(group: LayerGroup, position: int) -> int:
    """The first position that a row at `position` sees in the layers of a group."""
    return 0 if group.window is None else max(0, position - group.window + 1)
