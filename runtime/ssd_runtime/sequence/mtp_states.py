"""The MTP layer's progress in a sequence, and the model's final states that it continues from."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ssd_runtime.model.cache.kv_cache import KVCache
from ssd_runtime.model.cache.kv_pool import FORWARD_ROWS
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.model.runner import Ahead, FinalNorm, Work, concatenated


class MtpStates:
    """The number of slots with keys of the layer, and the model's final states of the tokens since.

    Slot i is for token i with the state of the token before it. Where that state is not known, it is zero: before the
    first token, and at the first token after a reused prefix. Drafts are a little worse for it, never the output.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self.end = 0
        """Slots with keys; those of drafts do not count."""
        self._first = 0
        """The token of the first of the states."""
        self._states: list[Tensor] = []
        """States [n, hidden] after the last sub-layer and before the final norm."""

    def copy(self, tokens: int | None = None) -> MtpStates:
        """Return an independent copy, of the first `tokens` tokens alone if given."""
        other = MtpStates(self._decoder)
        other.end, other._first, other._states = self.end, self._first, list(self._states)
        if tokens is not None:
            other.end = min(self.end, tokens)
            other._states = [concatenated(self._states)[: max(0, tokens - self._first)]] if self._states else []
            other._first = min(self._first, tokens)
        return other

    def add(self, states: Tensor) -> None:
        """Add the states [n, hidden] of the next tokens."""
        self._states.append(states)

    def join(self, parts: Sequence[Tensor], whole: Tensor) -> None:
        """Hold `whole` in place of its `parts`, if these are the latest states."""
        latest = self._states[-len(parts) :]
        if len(latest) == len(parts) and all(one is other for one, other in zip(latest, parts, strict=True)):
            self._states[-len(parts) :] = [whole]

    def normed(self, begin: int, end: int) -> Work[Tensor]:
        """The normed states [end - begin, hidden] before tokens `begin`, …, `end` - 1."""
        shape = (end - begin, self._decoder.shape.hidden)
        states = torch.zeros(shape, dtype=self._decoder.dtype, device=self._decoder.device)
        if self._states:
            known = concatenated(self._states)
            offset = begin - 1 - self._first
            found = known[max(0, offset) : max(0, offset + len(states))]
            states[max(0, -offset) :][: len(found)] = found
        return (yield FinalNorm(states))

    def wrote(self, end: int) -> None:
        """Take note that the first `end` slots have keys: states of tokens before the last of these go."""
        self.end = end
        if self._states:
            known = concatenated(self._states)
            kept = max(0, min(end - 1 - self._first, len(known)))
            self._first += kept
            # A copy: a view would keep the states of a whole chunk in memory.
            self._states = [known[kept:].clone()] if kept < len(known) else []

    def writing(self, cache: KVCache, ids: Sequence[int], end: int) -> Work[None]:
        """Write the keys of the tokens `ids` up to slot `end`, as far as there are none."""
        while self.end < end:
            begin, stop = self.end, min(end, self.end + FORWARD_ROWS)
            states = yield from self.normed(begin, stop)
            segment = self._decoder.batches.unseeing(cache, begin, stop - begin)
            yield Ahead(segment, ids[begin:stop], states, keys_alone=True)
            self.wrote(stop)
