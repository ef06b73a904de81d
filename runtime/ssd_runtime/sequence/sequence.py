"""One sequence: its tokens, its sampler, and the memory of its keys and states."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ssd_runtime.devices.clock import queues_work
from ssd_runtime.devices.transfer import take_rows
from ssd_runtime.model.cache.kv_cache import KVCache
from ssd_runtime.sampling.params import SamplingParams
from ssd_runtime.sampling.sampler import Sampler
from ssd_runtime.sequence.load import Load
from ssd_runtime.sequence.prefill import Prefill
from ssd_runtime.sequence.prefix_cache import Prefix, PrefixCache, shared_tokens
from ssd_runtime.sequence.prompt_states import PromptStates
from ssd_runtime.structure.matcher import Matcher


class TokenSequence:
    """A sequence being decoded. It holds no model: a `Session` is one with the model that runs it.

    Only `commit` adds to the committed tokens, whose keys and values are in the cache. So the next forward overwrites
    the keys of drafts and of rejected tokens.
    """

    def __init__(
        self,
        cache: KVCache,
        sampling: SamplingParams,
        device: torch.device,
        states: PromptStates,
        rope_switch: int | None = None,
        prefixes: PrefixCache | None = None,
        owner: str = "",
        version: int = 0,
    ) -> None:
        """With `prefixes`, `cache` is in their pool. They are shared with sequences of the same `owner` and `version`.

        `owner` is the name of a stream and `version` that of the model's weights. Longrope's second angles hold for
        more than `rope_switch` tokens; None for a model with one set of angles.
        """
        self.cache = cache
        self.ids: list[int] = []
        self.reused = 0
        """Prompt tokens that were not run, because the prompt began like an earlier sequence."""
        self.load: Load | None = None
        """Load of the step of the latest forward of the full model; None for a lone sequence."""
        self.ends: frozenset[int] = frozenset()
        """Tokens that end the answer, so that nothing need be drafted after them."""
        self.sampling = sampling
        self._device = device
        self._sampler = Sampler(sampling, device)
        self._states = states
        self._states_are_long = False
        """Whether the states were computed with longrope's second angles."""
        self._rope_switch = rope_switch
        self._prefixes = prefixes
        self._owner = owner
        self._version = version
        self._written = 0
        """The slot after the last that a request since the latest commit writes; 0 without one."""
        self._prompt: Prefill | None = None
        self._pending: int | None = None

    @property
    def matcher(self) -> Matcher | None:
        """The matcher of the grammar that the answer is held to; None without one."""
        return self._sampler.matcher

    @property
    def prefilled(self) -> bool:
        """Whether the whole prompt has been run."""
        return self._prompt is not None

    @property
    def pending(self) -> int:
        """The answer's latest token, which comes after the committed ones and which no forward has run yet."""
        assert self._pending is not None, "no token of the answer has been chosen"
        return self._pending

    @pending.setter
    def pending(self, token: int) -> None:
        self._pending = token

    @property
    def committed(self) -> int:
        """Number of tokens committed so far."""
        return len(self.ids)

    @property
    def written(self) -> int:
        """The slot after the last that holds the committed tokens, or rows of the requests after them."""
        return max(self.committed, self._written)

    def commit(self, ids: list[int], rows: list[int] | None = None, states: Tensor | None = None) -> None:
        """Commit `ids`, whose keys and values a forward has written.

        `rows` are their rows in the forward, in the order of positions; by default the first ones. `states` [n, hidden]
        are the forward's, after the last sub-layer, which a prefix cache and an MTP layer need.
        """
        for place, row in enumerate(rows or ()):
            if row != place:
                self.cache.move(self.committed + row, self.committed + place)
        self.ids.extend(ids)
        self.cache.states.settle(self.committed)
        self._written = 0
        if states is not None and (self._prefixes is not None or self._states.mtp is not None):
            # A view would keep the rows of all sequences of the forward in memory.
            self._states.add(take_rows(states, rows) if rows is not None else states[: len(ids)].clone())

    def known_prefix(self, ids: NDArray[np.int64]) -> tuple[Prefix, int] | None:
        """The kept prefix with the most tokens in common with a prompt, and their number; None without any."""
        if self._prefixes is None:
            return None
        return self._prefixes.longest(ids, self._is_long(len(ids)), self._version, self._owner)

    def awaits(self, ids: NDArray[np.int64], running: TokenSequence, prompt: NDArray[np.int64]) -> bool:
        """Whether a new prompt should wait for a running sequence to run its own `prompt`.

        It should if it can then copy more tokens from that than from any prefix that is known now, and is run sooner.
        """
        if self._prefixes is None or running._prefixes is not self._prefixes or running.prefilled:
            return False
        if running._owner != self._owner or self._is_long(len(ids)) != self._is_long(len(prompt)):
            return False
        shared = shared_tokens(ids, prompt)
        if not shared:
            return False
        found = self.known_prefix(ids)
        known = found[1] if found is not None else 0
        waiting = len(prompt) - running.committed + len(ids) - shared
        # Two prompts that run side by side take turns.
        return shared > known and waiting < 2 * (len(ids) - known)

    def _reuse(self, ids: list[int]) -> Prefix | None:
        """Take over the keys of the longest known prefix of a prompt, whose states are still to be resumed."""
        found = self.known_prefix(np.asarray(ids, np.int64))
        if self._prefixes is None or found is None:
            return None
        prefix, tokens = found
        # The keys come first: while this sequence waits for its states, another may take the prefix or drop it.
        self.cache = self._prefixes.reuse(prefix, tokens, self.cache)
        self.ids = ids[:tokens]
        self.reused = tokens
        return prefix

    def look_back(self, tokens: int, later: int = 0) -> None:
        """Make sliding layers keep all keys that the latest `tokens` tokens see, for a search that runs them again.

        It may do so until `later` more are committed; the states before them stay once they are pinned. This holds
        until the sequence returns to the end of its prompt, or takes another one.
        """
        self.cache.lookback = max(self.cache.lookback, tokens + later)
        self.cache.states.lookback = max(self.cache.states.lookback, tokens)

    def close(self, keep: bool = True) -> None:
        """Release the slots of a pool and all states; with `keep`, the tokens become a prefix for new sequences."""
        if self._prefixes is None:
            return
        self._withdraw()
        if keep and self.cache.long == self._states_are_long and self.cache.holds(self.committed):
            self._prefixes.keep(self._prefix(self._states))
        else:
            self.cache.release()
        self._states = PromptStates()
        self._prompt = None
        self._sampler.restart(0)

    def _prefix(self, states: PromptStates) -> Prefix:
        """The committed tokens, for sequences that begin alike."""
        return Prefix(
            ids=np.asarray(self.ids, np.int64),
            cache=self.cache,
            states=states,
            version=self._version,
            owner=self._owner,
        )

    def release(self) -> None:
        """Give the slots back to the pool; the tokens stay, for `recomputing`."""
        self._withdraw()
        self.cache.release()

    def _withdraw(self) -> None:
        """End the loan of the prompt."""
        if self._prefixes is not None:
            self._prefixes.withdraw(self.cache)

    @property
    def reads_late(self) -> bool:
        """Whether tokens are chosen on the device and read by the host once per cycle, since every read synchronises.

        It is true for greedy decoding without logits processors on devices that queue work.
        """
        return queues_work(self._device) and self._sampler.is_argmax

    def _is_long(self, tokens: int) -> bool:
        return self._rope_switch is not None and tokens > self._rope_switch
