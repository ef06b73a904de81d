"""What one request owns: its cache and how much of it is committed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ssd_profiles.errors import UserError
from ssd_profiles.mask import SkipMask
from ssd_runtime.engine.prefix_cache import Prefix, PrefixCache
from ssd_runtime.engine.prompt_states import BLOCK, PromptStates
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.model.kv_cache import FORWARD_ROWS
from ssd_runtime.model.runner import Forward, ModelRunner, Work
from ssd_runtime.sampling.params import GREEDY, SamplingParams
from ssd_runtime.sampling.sampler import Paths, Proposal, Sampler

PREFILL_CHUNK = FORWARD_ROWS
"""Tokens of a prompt that run through the model together. From 768 on, torch's attention on CPUs reads the keys once
per 256 rows, and not per 64: at 24k tokens of context a row takes a seventh less time."""
MAX_ROOM, POOL_ROOM = 4096, 256
"""New tokens that memory is taken for beforehand, in a sequence's own memory and in a pool: a higher limit is seldom
reached, and in a pool others wait for the room."""
MAX_BIAS_BYTES = 128 << 20
"""What masks a chunk's attention grows with the context: longer prompts go in smaller chunks."""


@dataclass(frozen=True, slots=True)
class Load:
    """What shared a forward of the full model."""

    sequences: int = 1
    rows: int = 1
    """Of all sequences together."""
    step: int = 0
    """The scheduler's number of the forward: equal for all that shared it."""


@dataclass(frozen=True, slots=True)
class Prefill:
    """What the pass over a prompt leaves behind: states behind the final norm, each [hidden]."""

    last: Tensor
    """Of the prompt's last token: its logits choose the first new token, and it is the `last` feature."""
    mean: Tensor
    """Mean over the prompt's tokens: the `mean` feature."""
    tokens: int
    states: PromptStates = field(default_factory=PromptStates, repr=False, compare=False)
    """What the mean was made of; a prompt that begins with this one goes on from it."""

    def feature(self, name: str) -> Tensor:
        """The routing feature, `last` or `mean`, in fp32 on the CPU."""
        return (self.last if name == "last" else self.mean).float().cpu()


class Session:
    """A sequence being decoded: the cache's first slots hold full-model keys and values of its committed tokens.

    Forwards write behind the committed tokens; only `commit` adds to these, so that what a draft or a rejected
    token wrote is overwritten by the next forward. Where a sequence outgrows the context that longrope's first
    angles are for, the committed tokens are computed again with the second, as transformers does.
    """

    def __init__(
        self, decoder: Decoder, sampling: SamplingParams = GREEDY, prefixes: PrefixCache | None = None
    ) -> None:
        """With `prefixes`, the sequence has its memory from their pool and begins after the longest that fits."""
        decoder.refresh()
        self.decoder = decoder
        self._runner = ModelRunner(decoder)
        self._prefixes, self._version = prefixes, decoder.version
        self.cache = decoder.new_cache() if prefixes is None else prefixes.pool.cache()
        self.ids: list[int] = []
        self.sampling = sampling
        self._sampler = Sampler(sampling, decoder.device)
        self._prompt: Prefill | None = None
        self._states, self._states_are_long = PromptStates(), False
        self.reused = 0
        """Tokens of the prompt that were not run, since an earlier sequence had begun with them."""
        self.chunk = PREFILL_CHUNK
        """Tokens of a prompt that run together: fewer where other sequences wait for the same forward."""
        self.load: Load | None = None
        """What shared the last forward of the full model; None where the sequence is alone."""

    @property
    def prefilled(self) -> bool:
        """Whether the whole prompt has been run."""
        return self._prompt is not None

    @property
    def committed(self) -> int:
        """Tokens committed so far."""
        return len(self.ids)

    def prefill(self, ids: list[int], behind: Prefill | None = None, new_tokens: int = 0) -> Prefill:
        """`prefilling` of a sequence that is alone."""
        return self._runner.finish(self.prefilling(ids, behind, new_tokens))

    def prefilling(self, ids: list[int], behind: Prefill | None = None, new_tokens: int = 0) -> Work[Prefill]:
        """Run the full model over a prompt from position 0, or over the rest of one `behind` its prefilled beginning.

        Takes the memory that the prompt and up to `new_tokens` more need. Raises UserError when the prompt is empty or
        leaves no room to decode.
        """
        known = self.ids[: behind.tokens] if behind is not None else []
        total, limit = len(known) + len(ids), self.decoder.shape.max_context
        if not ids:
            raise UserError("prompt: it is empty; give at least one token")
        if total >= limit:
            raise UserError(
                f"prompt: {total} tokens, but this model's context holds {limit}, the answer included; "
                "shorten the prompt"
            )
        long = self._is_long(total)
        if behind is not None and long != self.cache.long:
            known, ids, behind = [], known + ids, None
        self.ids, self._prompt, self.reused = known, None, 0
        self._states = behind.states.copy() if behind is not None else PromptStates()
        if behind is None:
            self.cache.restart()
            yield from self._reusing(ids)
        else:
            self.cache.rewind(behind.tokens)
        self.cache.long = self._states_are_long = long
        room = MAX_ROOM if self._prefixes is None else POOL_ROOM
        self.cache.reserve_tokens(min(total + min(new_tokens, room), limit))
        ids = known + ids
        while self.committed < total:
            chunk = ids[self.committed : self.committed + self._chunk()]
            self._states.add((yield self.request(chunk)))
            normed = yield from self._states.closing()
            self.commit(chunk)
        self.cache.mark(total)
        if self._prefixes is not None:
            self.cache.mark(total // BLOCK * BLOCK)
        self._prompt = Prefill(normed[-1], self._states.mean(normed, total), total, self._states.copy())
        return self._prompt

    def known_prefix(self, ids: Sequence[int]) -> tuple[Prefix, int] | None:
        """The prefix of a prompt whose keys and values are still there, and how many of its tokens are the prompt's."""
        if self._prefixes is None:
            return None
        return self._prefixes.longest(ids, self._is_long(len(ids)), self._version)

    def _reusing(self, ids: list[int]) -> Work[None]:
        """Take over the longest known prefix of a prompt."""
        found = self.known_prefix(ids)
        if self._prefixes is None or found is None:
            return
        prefix, tokens = found
        self._states = yield from prefix.states.resuming(tokens)
        self.cache = self._prefixes.reuse(prefix, tokens, self.cache)
        self.ids, self.reused = ids[:tokens], tokens

    def look_back(self, tokens: int) -> None:
        """Let sliding layers keep the keys that so many tokens before the latest see: a search will run them again."""
        self.cache.lookback = max(self.cache.lookback, tokens)

    def close(self, keep: bool = True) -> None:
        """Give slots of a pool back; with `keep`, the tokens stay known to sequences that begin alike."""
        if self._prefixes is None:
            return
        if keep and self.cache.long == self._states_are_long:
            self._prefixes.keep(self.ids, self.cache, self._states, self._version)
        else:
            self.cache.release()

    def fork(self) -> Session:
        """Another session that has the same tokens committed."""
        other = Session(self.decoder, self.sampling)
        other.cache.copy_from(self.cache, self.committed)
        other.commit(self.ids)
        other._states, other._states_are_long = self._states.copy(), self._states_are_long
        return other

    def request(
        self,
        rows: Sequence[int] | Tensor,
        ahead: int = 0,
        mask: SkipMask | None = None,
        first: int = 0,
        last: int | None = None,
        keep_states: bool = False,
    ) -> Forward:
        """A request to run `rows`, tokens or states [n, hidden], at the positions from `ahead` past the committed ones.

        They go through sub-layers `first`, …, `last` - 1 without those of `mask`.
        """
        start, n = self.committed + ahead, len(rows)
        self._make_room(start + n, start + n)
        segment = self.decoder.batches.consecutive(self.cache, start, n)
        return Forward([segment], rows, mask, first, last, keep_states)

    def tree_request(self, ids: list[int], depths: Tensor, visible: Tensor, keep_states: bool = False) -> Forward:
        """A request to run the full model on `ids`, each `depths` [n] positions past the committed tokens.

        Every row sees the committed tokens, and the rows where `visible` [n, n] is true. Keys and values of row i go
        to the i-th slot after the committed ones, whatever its position.
        """
        start, n = self.committed, len(ids)
        positions = start + depths
        self._make_room(start + n, int(positions.max()) + 1)
        known = torch.arange(start, device=positions.device)
        seen = torch.cat([visible.new_ones(n, start), visible], 1)
        segment = self.decoder.batches.tree(self.cache, positions, start, seen, torch.cat([known, positions]))
        return Forward([segment], ids, keep_states=keep_states)

    def forward(
        self,
        rows: Sequence[int] | Tensor,
        mask: SkipMask | None = None,
        ahead: int = 0,
        first: int = 0,
        last: int | None = None,
    ) -> Tensor:
        """The states [n, hidden] that answer a `request`, of a sequence that is alone."""
        [x] = self._runner.answer([self.request(rows, ahead, mask, first, last)])
        return x

    def forward_states(self, ids: Sequence[int]) -> list[Tensor]:
        """The 2L + 1 states [n, hidden] of `ids` after the committed tokens: X(0), and X(i) after sub-layer i - 1."""
        [states] = self._runner.answer([self.request(ids, keep_states=True)])
        return states

    def _make_room(self, slots: int, tokens: int) -> None:
        """Have `slots` slots, and angles for a sequence of so many tokens."""
        if self._is_long(tokens) and not self.cache.long:
            self._compute_again(long=True)
        self.cache.reserve(slots, self.committed)

    def rewind(self, prompt: Prefill) -> None:
        """Forget all tokens behind the prompt that was last prefilled, and the random numbers drawn for them.

        Raises UserError when that was another prompt, or when computing it again was interrupted.
        """
        if prompt is not self._prompt or self.committed < prompt.tokens:
            raise UserError("session: it does not hold this prompt any more; prefill it again")
        self.ids, self.load = self.ids[: prompt.tokens], None
        self.cache.rewind(prompt.tokens)
        self._states = prompt.states.copy()
        self._sampler.restart(prompt.tokens)
        if self._is_long(self.committed) != self.cache.long:
            self._compute_again(not self.cache.long)

    def commit(self, ids: list[int], rows: list[int] | None = None, states: Tensor | None = None) -> None:
        """Count the slots that a forward has filled for `ids` as committed.

        `rows` are those of the forward that `ids` were, in the order of their positions; the first by default.
        `states` [n, hidden] are the forward's, after the last sub-layer: a prefix cache has use for those of an answer.
        """
        for place, row in enumerate(rows or ()):
            if row != place:
                self.cache.move(self.committed + row, self.committed + place)
        self.ids.extend(ids)
        if states is not None and self._prefixes is not None:
            # A copy: a view would keep the rows of all sequences of the forward in memory.
            self._states.add(states[rows] if rows is not None else states[: len(ids)].clone())

    def choose(self, logits: Tensor, paths: Paths, drawn: Sequence[tuple[int, Tensor]] = ()) -> Callable[[int], int]:
        """What gives the token behind each row of `logits` (`Sampler.choose`); paths are behind the committed ones."""
        return self._sampler.choose(logits, self.ids, paths, drawn)

    def propose(self, logits: Tensor, path: Callable[[], list[int]], temperature: float | None = None) -> Proposal:
        """A token to draft behind the committed ones and a path (`Sampler.propose`)."""
        return self._sampler.propose(logits, self.ids, path, temperature)

    def gap(self, logits: Tensor, prompt: int, token: int, within: float) -> tuple[float, bool]:
        """How far the choice behind the committed tokens, `prompt` of them the prompt's, lies before `token`, in
        logits, and whether less than `within` makes it the choice."""
        self._sampler.restart(prompt)
        return self._sampler.gap(logits, self.ids, token, within)

    def draft_room(self, most: int) -> int:
        """How many of `most` drafts can be verified at once: all rows of a forward are rotated by the same angles."""
        switch = self.decoder.rope_switch
        return most if switch is None or self.cache.long else min(most, switch - self.committed - 1)

    def _is_long(self, tokens: int) -> bool:
        return self.decoder.rope_switch is not None and tokens > self.decoder.rope_switch

    def _compute_again(self, long: bool) -> None:
        self.cache.long = long
        for request in self.recomputing():
            self._runner.answer([request])

    def recomputing(self) -> Work[None]:
        """Run the committed tokens again, whose keys and values are lost or were rotated by other angles."""
        ids, self.ids = self.ids, []
        self.cache.restart(keep_marks=True)
        try:
            while self.committed < len(ids):
                chunk = ids[self.committed : self.committed + self._chunk()]
                yield self.request(chunk)
                self.commit(chunk)
        finally:
            self.ids = ids  # also where this is given up half-way

    def _chunk(self) -> int:
        """How many tokens of a prompt run together: whole blocks, and few enough for masks of bounded size."""
        fitting = MAX_BIAS_BYTES // (self.decoder.dtype.itemsize * (self.committed + PREFILL_CHUNK))
        return max(BLOCK, min(self.chunk, fitting) // BLOCK * BLOCK)
