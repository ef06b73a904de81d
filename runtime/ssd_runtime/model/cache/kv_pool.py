"""Memory for keys and values, from which sequences lease slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol
from weakref import finalize, ref

import torch

from ssd_runtime.model.cache.kv_layout import KVLayout
from ssd_runtime.model.cache.mixer_states import MixerStates
from ssd_runtime.model.cache.slot_ranges import SlotRanges

FORWARD_ROWS = 768
"""Most rows of one sequence in a forward: a chunk of a prompt."""
SPARE_SLOTS = 128
"""Slots beyond a sequence's tokens, for rows of a verification, drafts and tokens of a search."""
STATE_SHARE = 0.5
"""Largest share of a fixed pool that is set aside for the states of mixers that are no attention."""
LOOKBACK = 128
"""Tokens before the latest that a search may return to; sliding layers keep the windows of these too."""


def sliding_slots(window: int) -> int:
    """Number of slots of one sequence in layers with a window, however long it gets.

    More than half of them are spare, so that keys are moved to the front only now and then.
    """
    return window + LOOKBACK + max(window, FORWARD_ROWS) + SPARE_SLOTS


@dataclass(slots=True)
class Lease:
    """A sequence's slots `begin`, …, `end` - 1 in a layer group; the first one holds position `first`."""

    begin: int = 0
    end: int = 0
    first: int = 0

    @property
    def size(self) -> int:
        """Number of slots."""
        return self.end - self.begin

    @property
    def reach(self) -> int:
        """The first position after those with a slot."""
        return self.first + self.size


class Leaseholder(Protocol):
    """A sequence's cache, as the pool sees it."""

    leases: list[Lease]
    """One lease per layer group."""

    states: MixerStates
    """States of mixers that are no attention."""

    def placed(self, number: int) -> None:
        """Take note that the lease of layer group `number` has moved."""


class PoolFull(Exception):  # noqa: N818 - a state of the pool, which the scheduler handles
    """A pool of fixed size has no room for more slots."""


@dataclass(slots=True)
class LayerGroup:
    """Layers with the same window, in which a sequence has the same slots."""

    window: int | None
    layers: list[int]
    slot_bytes: int
    """Bytes that one slot takes over these layers."""
    ranges: SlotRanges = field(default_factory=SlotRanges)


class KVPool:
    """Keys and values of any number of sequences of one model.

    A sequence leases one contiguous range of slots per layer group, so that attention reads it as a view. With
    `max_bytes` the memory is allocated once and its pointers never move; a request for more raises `PoolFull`.
    Without `max_bytes`, which is for a lone sequence, the memory grows as needed.
    """

    def __init__(self, layout: KVLayout, max_bytes: int | None = None, sequences: int = 1) -> None:
        self.layout = layout
        self.fixed = max_bytes is not None
        keyed = layout.keyed
        self.groups = [
            LayerGroup(window, layers, sum(map(layout.layer_bytes, layers)))
            for window in dict.fromkeys(layout.windows[layer] for layer in keyed)
            for layers in [[layer for layer in keyed if layout.windows[layer] == window]]
        ]
        self._most_states = 0
        """Number of sequences whose states have room in a fixed pool."""
        shapes = [(2, 1, count, 0, width) for count, width in map(layout.slot_shape, range(len(layout.devices)))]
        self.storage = [
            torch.empty(shape, dtype=layout.held_dtype, device=device)
            for shape, device in zip(shapes, layout.devices, strict=True)
        ]
        """One tensor [2, 1, kv_heads, slots, width] per layer: keys, then values."""
        self._admitted: tuple[ref[Leaseholder], ...] = ()
        """Caches, for as long as somebody has them; another one makes another tuple, since threads read this one."""
        if max_bytes is not None:
            if layout.mixers:
                self._most_states = min(sequences, int(STATE_SHARE * max_bytes) // layout.state_bytes)
                max_bytes -= self.state_bytes
            for group, slots in zip(self.groups, self._sizes(max_bytes, sequences), strict=True):
                self._grow(group, slots)

    @property
    def bytes(self) -> int:
        """Bytes allocated, and those that are set aside for states."""
        return sum(group.ranges.size * group.slot_bytes for group in self.groups) + self.state_bytes

    @property
    def state_bytes(self) -> int:
        """Bytes that a fixed pool sets aside for states."""
        return self._most_states * self.layout.state_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of leased slots and of states."""
        used = sum((group.ranges.size - group.ranges.free) * group.slot_bytes for group in self.groups)
        return used + sum(cache.states.bytes for cache in self._caches)

    @property
    def _caches(self) -> list[Leaseholder]:
        """The caches that lease slots, or may."""
        return [cache for each in self._admitted if (cache := each()) is not None]

    def _have_states(self, released: Sequence[Leaseholder] = ()) -> int:
        """Number of sequences that have states, or slots and soon states, beside the `released` ones."""
        others = (cache for cache in self._caches if cache not in released)
        return sum(cache.states.bytes > 0 or any(lease.size for lease in cache.leases) for cache in others)

    @property
    def most_slots(self) -> int:
        """Most slots that one sequence can have in every layer of a fixed pool: `max_slots` if it is large enough."""
        most = self.layout.max_slots
        short = list[int]()
        for group in self.groups:
            # Sliding layers may outgrow their usual slots once before they slide.
            needed = most if group.window is None else min(most, sliding_slots(group.window) + SPARE_SLOTS)
            if needed > group.ranges.size:
                short.append(group.ranges.size)
        return min(short, default=most)

    def admit(self, cache: Leaseholder) -> None:
        """Let a new cache lease slots. One that is never released gives its slots back when it is garbage."""
        self._admitted = (*(each for each in self._admitted if each() is not None), ref(cache))
        finalize(cache, self.give_back, cache.leases)

    def has_room(self, tokens: int) -> bool:
        """Whether another sequence of `tokens` tokens, its spare slots and states fit; moves others if necessary."""
        if self.fixed and self.layout.mixers and self._have_states() >= self._most_states:
            return False
        for group in self.groups:
            needed = self._needed(group, tokens)
            if group.ranges.longest < needed and group.ranges.free >= needed:
                self._compact(group)
            if group.ranges.longest < needed:
                return not self.fixed
        return True

    def would_have_room(self, tokens: int, released: Sequence[Leaseholder]) -> bool:
        """Whether `has_room` will be true once the caches `released` have given back their slots."""
        if not self.fixed:
            return True
        if self.layout.mixers and self._have_states(released) >= self._most_states:
            return False
        freed = [sum(cache.leases[number].size for cache in released) for number in range(len(self.groups))]
        return all(
            group.ranges.free + more >= self._needed(group, tokens)
            for group, more in zip(self.groups, freed, strict=True)
        )

    def _needed(self, group: LayerGroup, tokens: int) -> int:
        """Slots that a sequence of `tokens` tokens and its spare slots take in a layer group."""
        return min(self.slots_for(group, tokens + SPARE_SLOTS), self.layout.max_slots)

    def slots_for(self, group: LayerGroup, slots: int) -> int:
        """Number of slots that a sequence of `slots` slots has in a layer group."""
        return slots if group.window is None else min(slots, sliding_slots(group.window))

    def resize(self, number: int, lease: Lease, size: int) -> None:
        """Change a lease of layer group `number` to `size` slots and keep their content.

        Raises PoolFull if a fixed pool has no more.
        """
        group = self.groups[number]
        more = size - lease.size
        if more <= 0:
            group.ranges.give_back(lease.end + more, lease.end)
        elif not (lease.size and group.ranges.extend(lease.end, more)):
            if (begin := group.ranges.take(size)) is not None:
                self._copy(group, source=lease.begin, target=begin, count=lease.size)
                group.ranges.give_back(lease.begin, lease.end)
                lease.end = begin + lease.size
                lease.begin = begin
            else:
                self._free_after(group, lease, more)
        lease.end += more
        if more > 0 and self.layout.key_multiple > 1:
            # Hidden keys count as 0 times their values, so these must be numbers.
            for layer in group.layers:
                self.storage[layer][:, :, :, lease.end - more : lease.end] = 0

    def give_back(self, leases: Sequence[Lease]) -> None:
        """Free the slots of leases, one per layer group."""
        for group, lease in zip(self.groups, leases, strict=True):
            group.ranges.give_back(lease.begin, lease.end)
            lease.begin = 0
            lease.end = 0
            lease.first = 0

    def _free_after(self, group: LayerGroup, lease: Lease, more: int) -> None:
        """Move a lease after all others, and hand out `more` slots right after it.

        Raises PoolFull if a fixed pool has no more.
        """
        if group.ranges.free < more:
            if self.fixed:
                raise PoolFull
            self._grow(group, group.ranges.size + more - group.ranges.free)
        self._compact(group, lease)
        if lease.size == 0:
            lease.begin = group.ranges.size - group.ranges.free
            lease.end = lease.begin
        extended = group.ranges.extend(lease.end, more)
        assert extended, "all free slots come after the last lease"

    def _grow(self, group: LayerGroup, size: int) -> None:
        for layer in group.layers:
            old = self.storage[layer]
            grown = old.new_empty((*old.shape[:3], size, old.shape[4]))
            kept = min(size, old.shape[3])
            grown[:, :, :, :kept] = old[:, :, :, :kept]
            self.storage[layer] = grown
        # The ranges grow last: if growth is interrupted between two layers, it has not happened.
        group.ranges.grow(size)

    def _compact(self, group: LayerGroup, last: Lease | None = None) -> None:
        """Move all leases of a layer group to its beginning, `last` at the end, so that one free range is left."""
        number = self.groups.index(group)
        ranges = SlotRanges(group.ranges.size)
        caches = [cache for cache in self._caches if cache.leases[number].size]
        caches.sort(key=lambda cache: (cache.leases[number] is last, cache.leases[number].begin))
        if caches and caches[-1].leases[number] is last and len(caches) > 1:
            # The others move to its place, so its content is copied first.
            kept = [self.storage[layer][:, :, :, last.begin : last.end].clone() for layer in group.layers]
        else:
            kept = []
        for cache in caches:
            lease = cache.leases[number]
            size = lease.size
            begin = ranges.take(size)
            assert begin is not None, "the leases had room before"
            if lease is last and kept:
                for layer, slots in zip(group.layers, kept, strict=True):
                    self.storage[layer][:, :, :, begin : begin + size] = slots
            else:
                self._copy(group, source=lease.begin, target=begin, count=size)
            lease.begin = begin
            lease.end = begin + size
            cache.placed(number)
        group.ranges = ranges

    def _copy(self, group: LayerGroup, source: int, target: int, count: int) -> None:
        if source == target or not count:
            return
        overlapping = abs(source - target) < count
        for layer in group.layers:
            slots = self.storage[layer]
            old = slots[:, :, :, source : source + count]
            slots[:, :, :, target : target + count] = old.clone() if overlapping else old

    def _sizes(self, max_bytes: int, sequences: int) -> list[int]:
        """Number of slots of each layer group: sliding groups need few per sequence, and the others share the rest."""
        equal = max_bytes // self.layout.bytes_per_slot
        windows = [group.window for group in self.groups]
        sizes = [0 if window is None else min(equal, sequences * sliding_slots(window)) for window in windows]
        left = max_bytes - sum(size * group.slot_bytes for size, group in zip(sizes, self.groups, strict=True))
        growing = sum(group.slot_bytes for group in self.groups if group.window is None)
        return [left // growing if window is None else size for size, window in zip(sizes, windows, strict=True)]
