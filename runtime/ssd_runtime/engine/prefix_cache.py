"""Keys and values of sequences that have ended, for those that begin with the same tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ssd_runtime.engine.prompt_states import BLOCK, PromptStates
from ssd_runtime.model.kv_cache import KVCache
from ssd_runtime.model.kv_pool import KVPool

SHARE = 0.5
"""Most of the pool that prefixes take."""
TAKEN_OVER = 0.75
"""A prefix of which this share is reused goes over to the new sequence; of one that is reused less, a copy is made."""


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """The committed tokens of a sequence that has ended."""

    ids: NDArray[np.int64]
    cache: KVCache
    states: PromptStates
    version: int
    """The decoder's, when they were computed: with other weights the keys are others."""

    def common(self, ids: NDArray[np.int64]) -> int:
        """Number of leading tokens that both have, as far as decoding can go on after them: a multiple of `BLOCK`."""
        most = min(len(ids), len(self.ids))
        differing = np.flatnonzero(self.ids[:most] != ids[:most])
        same = int(differing[0]) if differing.size else most
        positions = range(same // BLOCK * BLOCK, 0, -BLOCK)
        return next((position for position in positions if self.cache.resumable(position)), 0)


class PrefixCache:
    """Prefixes within a pool, the one that was used last at the end.

    They take at most `SHARE` of the pool, and give way wherever a running sequence needs the room.
    """

    def __init__(self, pool: KVPool) -> None:
        self.pool = pool
        self._prefixes: list[Prefix] = []

    @property
    def bytes(self) -> int:
        """Memory that the prefixes take."""
        return sum(prefix.cache.bytes for prefix in self._prefixes)

    def __len__(self) -> int:
        """Number of prefixes."""
        return len(self._prefixes)

    def keep(self, ids: Sequence[int], cache: KVCache, states: PromptStates, version: int) -> None:
        """Take over the cache of a sequence that has ended; what does not fit in is forgotten, oldest first."""
        if len(ids) < BLOCK:
            cache.release()
            return
        cache.trim(len(ids))
        new = Prefix(np.asarray(ids, np.int64), cache, states, version)
        for old in self._prefixes[:]:
            # An earlier turn of the same conversation, and whatever other weights have computed, is of no more use.
            if old.version != version or new.common(old.ids) >= len(old.ids) // BLOCK * BLOCK:
                self._forget(old)
        self._prefixes.append(new)
        while self._prefixes and self.bytes > SHARE * self.pool.bytes:
            self._forget(self._prefixes[0])

    def longest(self, ids: Sequence[int], long: bool, version: int) -> tuple[Prefix, int] | None:
        """The prefix that shares most tokens with a prompt, and how many; at least one token is left to run.

        `long` says on which side of longrope's switch the prompt is: angles differ there.
        """
        wanted = np.asarray(ids[:-1], np.int64)
        usable = [each for each in self._prefixes if each.cache.long == long and each.version == version]
        found = max(((each.common(wanted), place) for place, each in enumerate(usable)), default=(0, 0))
        return (usable[found[1]], found[0]) if found[0] else None

    def reuse(self, prefix: Prefix, tokens: int, cache: KVCache) -> KVCache:
        """A cache of the first `tokens` tokens: the prefix's own, or `cache` with a copy of them."""
        self._prefixes.remove(prefix)
        if tokens < TAKEN_OVER * len(prefix.ids):
            self._prefixes.append(prefix)
            cache.copy_from(prefix.cache, tokens)
            return cache
        cache.release()
        prefix.cache.rewind(tokens)
        return prefix.cache

    def make_room(self, tokens: int, spared: Prefix | None = None) -> bool:
        """Forget prefixes, oldest first, until a sequence of so many tokens fits; whether it does.

        `spared` is forgotten last.
        """
        order = sorted(self._prefixes, key=lambda prefix: prefix is spared)
        while not self.pool.has_room(tokens):
            if not order:
                return False
            self._forget(order.pop(0))
        return True

    def forget_oldest(self) -> bool:
        """Forget the prefix that was used longest ago; whether there was one."""
        if self._prefixes:
            self._forget(self._prefixes[0])
            return True
        return False

    def _forget(self, prefix: Prefix) -> None:
        self._prefixes.remove(prefix)
        prefix.cache.release()
