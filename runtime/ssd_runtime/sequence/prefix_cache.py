"""Keeps keys and values of ended sequences, and lends those of running ones, for prompts that begin alike."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ssd_runtime.model.cache.kv_cache import KVCache
from ssd_runtime.model.cache.kv_pool import KVPool
from ssd_runtime.sequence.prompt_states import BLOCK, PromptStates

SHARE = 0.5
"""Largest share of the pool that prefixes take."""
TAKEN_OVER = 0.75
"""A sequence that reuses at least this share of a prefix takes over its cache; others copy the common part."""


@dataclass(frozen=True, eq=False)
class Prefix:
    """The committed tokens of an ended sequence, or the prompt of a running one."""

    ids: NDArray[np.int64]
    cache: KVCache
    states: PromptStates
    version: int
    """Version of the decoder that computed the keys: other weights make other keys."""
    owner: str = ""
    """Name of the stream it came from; other streams do not see it."""

    @cached_property
    def start(self) -> bytes:
        """The first `BLOCK` tokens as bytes. Prompts that begin otherwise cannot resume after the prefix."""
        return _start(self.ids)

    @cached_property
    def size(self) -> int:
        """Bytes of its keys, values and states, once no sequence adds to them."""
        return self.cache.bytes + self.states.bytes

    def common(self, ids: NDArray[np.int64]) -> int:
        """Number of common leading tokens after which decoding can resume: a multiple of `BLOCK`."""
        positions = range(_same(self.ids, ids) // BLOCK * BLOCK, 0, -BLOCK)
        return next((position for position in positions if self.cache.resumable(position)), 0)


class PrefixCache:
    """Prefixes within a pool, the least recently used first.

    With their states they take at most `SHARE` of the pool, and are dropped when a running sequence needs the room.
    A prefix serves only sequences of its owner, because the time of a prefill shows whether its beginning was known.
    Running sequences lend their prompts, which are copied and take no room of their own.
    """

    def __init__(self, pool: KVPool) -> None:
        self.pool = pool
        self._prefixes: list[Prefix] = []
        self._lent: list[Prefix] = []
        """Prompts of running sequences."""

    @property
    def bytes(self) -> int:
        """Bytes of the prefixes' keys and values."""
        return sum(each.cache.bytes for each in self._prefixes)

    def __len__(self) -> int:
        """Number of prefixes."""
        return len(self._prefixes)

    def keep(self, new: Prefix) -> None:
        """Take over the cache of an ended sequence, and drop the least recently used prefixes that do not fit."""
        if len(new.ids) < BLOCK or any(each.version > new.version for each in self._prefixes):
            new.cache.release()  # no prompt could resume after it
            return
        new.cache.trim(len(new.ids))
        if new.size > SHARE * self.pool.bytes:
            new.cache.release()  # else it would push out all others, and itself in the end
            return
        for old in self._prefixes[:]:
            # Earlier turns of the same conversation and prefixes of other weights are of no more use.
            alike = old.owner == new.owner and old.start == new.start
            contained = alike and new.common(old.ids) >= len(old.ids) // BLOCK * BLOCK
            if contained or old.version != new.version:
                self._forget(old)
        self._prefixes.append(new)
        while sum(each.size for each in self._prefixes) > SHARE * self.pool.bytes:
            self._forget(self._prefixes[0])

    def lend(self, prompt: Prefix) -> None:
        """Let new sequences copy the prompt of a running sequence, until `withdraw`."""
        if len(prompt.ids) >= BLOCK:
            self._lent.append(prompt)

    def withdraw(self, cache: KVCache) -> None:
        """End the loan of a sequence's prompt, whose keys are about to change or to be released."""
        self._lent = [each for each in self._lent if each.cache is not cache]

    def longest(self, ids: NDArray[np.int64], long: bool, version: int, owner: str = "") -> tuple[Prefix, int] | None:
        """The owner's prefix with the most tokens in common with a prompt, and their number; None without any.

        At least one token of the prompt is left to run. `long` is the prompt's side of longrope's switch, whose sides
        differ in angles.
        """
        wanted = ids[:-1]
        start = _start(wanted)
        usable = [
            each
            for each in (*self._lent, *self._prefixes)
            if each.start == start and each.owner == owner and each.version == version and each.cache.long == long
        ]
        found = max(((each.common(wanted), place) for place, each in enumerate(usable)), default=(0, 0))
        return (usable[found[1]], found[0]) if found[0] else None

    def reuse(self, prefix: Prefix, tokens: int, cache: KVCache) -> KVCache:
        """Return a cache of the prefix's first `tokens` tokens: the prefix's own, or `cache` with a copy of them."""
        if prefix in self._lent:
            cache.copy_from(prefix.cache, tokens)
            return cache
        self._prefixes.remove(prefix)
        if tokens < TAKEN_OVER * len(prefix.ids):
            self._prefixes.append(prefix)
            cache.copy_from(prefix.cache, tokens)
            return cache
        cache.release()
        prefix.cache.rewind(tokens)
        return prefix.cache

    def make_room(self, tokens: int, spared: Prefix | None = None) -> bool:
        """Drop prefixes, least recently used first and `spared` last, until a sequence of `tokens` tokens fits.

        Returns whether it fits. If it would not even without any prefix, none is dropped.
        """
        if not self.pool.would_have_room(tokens, [prefix.cache for prefix in self._prefixes]):
            return False
        order = sorted(self._prefixes, key=lambda prefix: prefix is spared)
        while not self.pool.has_room(tokens):
            if not order:
                return False
            self._forget(order.pop(0))
        return True

    def forget_oldest(self) -> bool:
        """Drop the least recently used prefix; returns whether there was one."""
        if self._prefixes:
            self._forget(self._prefixes[0])
            return True
        return False

    def _forget(self, prefix: Prefix) -> None:
        self._prefixes.remove(prefix)
        prefix.cache.release()


def shared_tokens(ids: NDArray[np.int64], other: NDArray[np.int64]) -> int:
    """Number of common leading tokens of two prompts, in whole blocks; at least one token of `ids` is left."""
    if _start(ids) != _start(other):
        return 0
    return _same(ids[:-1], other) // BLOCK * BLOCK


def _same(one: NDArray[np.int64], other: NDArray[np.int64]) -> int:
    """Number of common leading tokens."""
    most = min(len(one), len(other))
    differing = np.flatnonzero(one[:most] != other[:most])
    return int(differing[0]) if differing.size else most


def _start(ids: NDArray[np.int64]) -> bytes:
    """The first block of tokens."""
    return ids[:BLOCK].tobytes()
