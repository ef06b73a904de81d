"""One sequence's states of the mixers that are no attention, and the inputs of the rows since (`mixers/mixer.py`)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ssd_runtime.devices.transfer import to_device
from ssd_runtime.model.mixers.mixer import Mixer, State

MOST_SPARE = 64
"""Most rows of a ring that is kept for the next forwards once its rows are committed."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A mixer's state after so many tokens."""

    tokens: int
    state: State


@dataclass(frozen=True, slots=True)
class Past:
    """A state and the inputs of the committed rows since."""

    start: Kept
    inputs: Tensor

    @property
    def end(self) -> int:
        """Number of tokens after the last row."""
        return self.start.tokens + len(self.inputs)

    def read(self, begin: int, end: int) -> Tensor:
        """The inputs of slots `begin`, …, `end` - 1."""
        return self.inputs[begin - self.start.tokens : end - self.start.tokens]

    def followed_by(self, inputs: Tensor) -> Past:
        """This past with further rows."""
        return Past(self.start, torch.cat([self.inputs, inputs]))

    def shortened(self, lookback: int, mixer: Mixer) -> Past:
        """The past of the last `lookback` rows, once it has twice as many."""
        dropped = len(self.inputs) - lookback
        if dropped <= lookback:
            return self
        _, state = mixer.scan(self.start.state, self.inputs[:dropped])
        return Past(Kept(self.start.tokens + dropped, state), self.inputs[dropped:].clone())


class LayerStates:
    """One mixer's states of one sequence: after committed tokens, and after the latest row if rows were consecutive.

    The inputs of the rows after the committed state lie in a ring by slot.
    """

    def __init__(self, mixer: Mixer) -> None:
        self.mixer = mixer
        self.base = Kept(0, mixer.empty())
        """State after committed tokens, whose rows ran through the full model."""
        self._past: Past | None = None
        """An earlier one and the inputs since, if searches run recent tokens again."""
        self.tip: Kept | None = None
        """State after the latest rows, committed or not."""
        self._ring: Tensor | None = None
        self._since = 0
        """The first slot from which on inputs are kept."""

    @property
    def bytes(self) -> int:
        """Bytes of states and inputs."""
        past = [] if self._past is None else [self._past.inputs]
        rows = sum(len(each) for each in (self._ring, *past) if each is not None)
        return rows * self.mixer.row_bytes + (2 + len(past)) * self.mixer.state_bytes

    def reset(self, kept: Kept) -> None:
        """Start from a state."""
        self.base = kept
        self._past = None
        self.tip = None
        self._since = kept.tokens

    def after(self, tokens: int) -> State:
        """The state after the first `tokens` slots (`kept_after`)."""
        return self.kept_after(tokens).state

    def kept_after(self, tokens: int, near: Kept | None = None) -> Kept:
        """The state after the first `tokens` slots, from an earlier one and the inputs since.

        `near` is one that this has returned. Raises ValueError if the state is not kept: it lies before the committed
        one, and no search looks back so far.
        """
        for known in (self.base, self.tip, near):
            if known is not None and known.tokens == tokens:
                return known
        past = self._past
        if tokens > self.base.tokens >= self._since:
            start, read = self.base, self.read
        elif past is not None and past.start.tokens <= tokens <= past.end:
            start, read = past.start, past.read
        else:
            raise ValueError(f"the state after {tokens} tokens of a {self.mixer.name} layer is not kept")
        if near is not None and start.tokens < near.tokens < tokens:
            start = near
        if start.tokens == tokens:
            return start
        return Kept(tokens, self.mixer.scan(start.state, read(start.tokens, tokens))[1])

    def fold(self, committed: int, lookback: int, pinned: int | None) -> None:
        """Move the committed state on to `committed` tokens.

        Searches ask for states up to `lookback` tokens before it, or up to `pinned` tokens.
        """
        before = self.base
        if before.tokens >= committed:
            return
        self.base = Kept(committed, self.after(committed))
        if not lookback or before.tokens < self._since:
            self._past = None
        elif pinned is None or before.tokens < pinned:
            inputs = self.read(before.tokens, committed)
            past = self._past
            if past is None or past.end < before.tokens:  # the first one, or one after tokens that were pinned
                past = Past(before, inputs[:0])
            self._past = past.followed_by(inputs).shortened(lookback, self.mixer)
        if self._ring is not None and len(self._ring) > MOST_SPARE:
            self._ring = None

    def write(self, slot: int, inputs: Tensor, state: State | None) -> None:
        """Keep the inputs of the rows in slots `slot`, …, and the state after them if they follow each other."""
        n = len(inputs)
        self.tip = None if state is None else Kept(slot + n, state)
        self._reserve(slot, slot + n - self.base.tokens, inputs)
        assert self._ring is not None
        self._ring[self._places(slot, slot + n)] = inputs

    def skip(self, slot: int, state: State) -> None:
        """Keep the state before `slot` alone: all rows before it are about to be committed."""
        self.tip = Kept(slot, state)
        self._since = slot

    def saved(self, begin: int, end: int) -> Tensor:
        """A copy of the inputs of slots `begin`, …, `end` - 1; of those that no row has run in, it may have none."""
        if self._ring is None:
            return torch.empty(0, self.mixer.width)
        return self.read(begin, min(end, begin + len(self._ring))).clone()

    def read(self, begin: int, end: int) -> Tensor:
        """The inputs of slots `begin`, …, `end` - 1."""
        assert self._ring is not None, "no inputs are kept"
        return self._ring[self._places(begin, end)]

    def move(self, source: int, target: int) -> None:
        """Put a copy of the inputs of slot `source` into slot `target`."""
        assert self._ring is not None, "no inputs are kept"
        self._ring[target % len(self._ring)] = self._ring[source % len(self._ring)]

    def _places(self, begin: int, end: int) -> slice | Tensor:
        assert self._ring is not None
        size = len(self._ring)
        first = begin % size
        if first + end - begin <= size:
            return slice(first, first + end - begin)
        return to_device([slot % size for slot in range(begin, end)], self._ring.device)

    def _reserve(self, last: int, rows: int, like: Tensor) -> None:
        """Make the ring hold `rows` rows after the committed state; those before slot `last` keep their inputs."""
        old = self._ring
        if old is not None and len(old) >= rows:
            return
        size = 1 << max(rows - 1, 7).bit_length()
        begin = max(self.base.tokens, self._since)
        kept = None if old is None or begin >= last else self.read(begin, last)
        self._ring = like.new_empty(size, like.shape[1])
        if kept is not None:
            self._ring[self._places(begin, last)] = kept


class MixerStates:
    """The states of one sequence in all mixers that are no attention, by layer."""

    def __init__(self, mixers: Mapping[int, Mixer]) -> None:
        self._mixers = mixers
        self._layers: dict[int, LayerStates] = {}
        self._marks: dict[int, dict[int, State] | None] = {}
        """States to return to by number of tokens; None until so many are committed."""
        self.committed = 0
        """Number of committed tokens: states of no others are kept as committed ones."""
        self.lookback = 0
        """Number of tokens before the latest whose states a search may ask for."""
        self.pinned: int | None = None
        """Number of tokens that it asks for at most, however many follow; None for the latest."""

    @property
    def bytes(self) -> int:
        """Bytes of all states and inputs."""
        marked = sum(self._mixers[layer].state_bytes for each in self._marks.values() for layer in each or ())
        return marked + sum(each.bytes for each in self._layers.values())

    def of(self, layer: int) -> LayerStates:
        """The states of a layer's mixer after the committed tokens."""
        found = self._layers.get(layer)
        if found is None:
            found = self._layers[layer] = LayerStates(self._mixers[layer])
        found.fold(self.committed, self.lookback, self.pinned)
        return found

    def settle(self, committed: int) -> None:
        """Commit the first `committed` tokens; states of rejected rows are dropped."""
        self.committed = committed
        for each in self._layers.values():
            if each.tip is not None and each.tip.tokens != committed:
                each.tip = None
        if committed in self._marks:
            self.mark(committed)

    def mark(self, tokens: int) -> None:
        """Keep the states after `tokens` tokens, now or as soon as these are committed."""
        if self._mixers and tokens and self._marks.get(tokens) is None:
            self._marks[tokens] = self._after(tokens) if tokens == self.committed else None

    def forget_marks(self, spared: Collection[int]) -> None:
        """Forget all marks but `spared`."""
        self._marks = {mark: states for mark, states in self._marks.items() if mark in spared}

    def next_mark(self, tokens: int) -> int | None:
        """The first position after `tokens` whose states are still to be kept: a forward must end there."""
        return min((mark for mark, states in self._marks.items() if states is None and mark > tokens), default=None)

    def resumable(self, tokens: int) -> bool:
        """Whether the states after `tokens` tokens are known, if there are any."""
        return not self._mixers or not tokens or self._marks.get(tokens) is not None

    def looked_back(self, committed: int) -> range:
        """The tokens among the first `committed` before which searches ask for states."""
        end = committed if self.pinned is None else self.pinned
        return range(max(0, end - self.lookback), end)

    def rewind(self, tokens: int) -> None:
        """Return to `tokens` tokens, which must be resumable; later marks are dropped."""
        self._start(tokens, self._after(tokens))
        self.lookback = 0
        self.pinned = None
        self._marks = {mark: states for mark, states in self._marks.items() if mark <= tokens}

    def restart(self, keep_marks: bool = False) -> None:
        """Return to no tokens at all; with `keep_marks` the same tokens come again, and their states are kept again."""
        self._layers = {}
        if not keep_marks:
            self.lookback = 0
            self.pinned = None
        self._marks = dict.fromkeys(self._marks) if keep_marks else {}
        self.committed = 0

    def copy_from(self, other: MixerStates, tokens: int) -> None:
        """Take the first `tokens` tokens of another sequence, which must be resumable or all that it has committed."""
        states = other._after(tokens)
        self._start(tokens, states)
        self._marks = {tokens: states} if self._mixers else {}

    def trim(self) -> None:
        """Keep marked states alone."""
        self._layers = {}

    def save(self, begin: int, end: int) -> dict[int, Tensor]:
        """Copies of the inputs of slots `begin`, …, `end` - 1, by layer, for `load`."""
        return {layer: self.of(layer).saved(begin, end) for layer in self._mixers}

    def load(self, begin: int, saved: Mapping[int, Tensor]) -> None:
        """Write the inputs of `save` to slots `begin`, …"""
        for layer, inputs in saved.items():
            if len(inputs):
                self.of(layer).write(begin, inputs, None)

    def move(self, source: int, target: int) -> None:
        """Put a copy of the inputs of slot `source` into slot `target` in every layer."""
        for each in self._layers.values():
            each.move(source, target)

    def _after(self, tokens: int) -> dict[int, State]:
        """The states of all mixers after `tokens` tokens."""
        marked = self._marks.get(tokens)
        return marked or {layer: self.of(layer).after(tokens) for layer in self._mixers}

    def _start(self, tokens: int, states: Mapping[int, State]) -> None:
        self._layers = {layer: LayerStates(mixer) for layer, mixer in self._mixers.items()}
        for layer, state in states.items():
            self._layers[layer].reset(Kept(tokens, state))
        self.committed = tokens
