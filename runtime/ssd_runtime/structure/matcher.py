"""Follows one answer through a grammar, and through what is drafted after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ssd_runtime.devices.transfer import to_device
from ssd_runtime.structure.structure import StructureError

if TYPE_CHECKING:
    from llguidance import LLMatcher

MOST_RUN = 256
"""Forced tokens that are kept: more are compared with an answer in vain."""


class Matcher:
    """The tokens that a grammar allows after an answer's tokens.

    Every question names the tokens that it is about: those `known`, the prompt's first, and a `path` of drafts after
    them. The matcher goes there by the shortest way: back to where the last question's path parts, then forward. So
    the rows of a tree may be asked about in any order, and nothing has to be rolled back. Known tokens are final.
    """

    def __init__(
        self, state: LLMatcher, eos_ids: frozenset[int], never: Sequence[int], text_of: Callable[[list[int]], str]
    ) -> None:
        """`never` are tokens that `state` allows, although they neither end an answer nor are text.

        `text_of` has replacement characters for bytes of characters that are not whole.
        """
        self._state = state
        self._text_of = text_of
        self._eos_ids = eos_ids
        self._never = list(never)
        self.restart(0)

    def restart(self, prompt_tokens: int) -> None:
        """Begin an answer after a prompt of `prompt_tokens` tokens."""
        self._state.reset()
        self._first = prompt_tokens
        self._final = 0
        """Number of the answer's tokens that are known."""
        self._ahead: list[int] = []
        """Tokens after these that the state has consumed."""
        self._runs: list[tuple[int, list[int]]] = []
        """Tokens on the way there that were found to be forced, one after another, and the number of those before them.
        A run that is left for a time stays: from its middle, its text might be cut into other tokens."""

    def masked(self, logits: Tensor, known: Sequence[int], path: Sequence[int]) -> Tensor:
        """A copy of `logits` [vocabulary] with minus infinity for tokens that the grammar does not allow.

        After a path that the grammar does not allow, or that ends the answer, logits stay as they are: no choice there
        is part of an answer. Raises StructureError if the grammar has become too complex.
        """
        if not self._go(known, path) or (self._state.is_stopped() and not self._eos_ids):
            return logits
        bits = np.frombuffer(self._state.compute_bitmask(), np.uint8)
        self._require_bounded()
        allowed = np.unpackbits(bits, bitorder="little")[: len(logits)]
        allowed[self._never] = 0
        return logits.masked_fill(to_device(torch.from_numpy(allowed == 0), logits.device), -torch.inf)

    def forced(self, known: Sequence[int], path: Sequence[int]) -> int | None:
        """The one token that the grammar allows; None if it allows several, or as `masked` says."""
        if not self._go(known, path):
            return None
        if self._state.is_stopped():
            return next(iter(self._eos_ids)) if len(self._eos_ids) == 1 else None
        here = self._final + len(self._ahead)
        start, run = self._runs[-1] if self._runs else (here, [])
        place = here - start
        if not (place < len(run) and self._since(start, known, path)[:place] == run[:place]):
            # To find a long run takes long. A text may also be cut into other tokens than those of its run.
            run, place = self._state.compute_ff_tokens()[:MOST_RUN], 0
            self._require_bounded()
            # Asked within a character, llguidance cuts the bytes that follow into other tokens.
            whole = next((at for at, token in enumerate(run) if "\ufffd" in self._text_of([token])), MOST_RUN)
            del run[whole + 1 :]
            if run:
                self._runs.append((here, run))
        return run[place] if run else None

    def allows(self, known: Sequence[int], path: Sequence[int], token: int) -> bool:
        """Whether the grammar allows `token`; not after a path that it does not allow, or that ends the answer."""
        if not self._go(known, path):
            return False
        if token in self._eos_ids:
            return self._state.is_accepting()
        return token not in self._never and self._state.validate_tokens([token]) == 1

    def completes(self, answer: Sequence[int]) -> bool:
        """Whether nothing but the end may follow an answer; asked after every one of its tokens, for one at a time."""
        if len(answer) == 1:
            self.restart(0)
        return self._go(answer, ()) and self._state.is_stopped()

    def _since(self, start: int, known: Sequence[int], path: Sequence[int]) -> list[int]:
        """The answer's tokens from number `start` on."""
        begin = self._first + start
        return [*known[begin:], *path[max(0, begin - len(known)) :]]

    def _go(self, known: Sequence[int], path: Sequence[int]) -> bool:
        """Consume the tokens that lead there; returns whether the grammar allows them and the answer goes on.

        Raises StructureError if it does not allow known tokens, which were chosen by it.
        """
        number = len(known) - self._first
        target = [*known[self._first + self._final :], *path[max(0, self._final - number) :]]
        common = 0
        while common < min(len(target), len(self._ahead)) and target[common] == self._ahead[common]:
            common += 1
        if common < len(self._ahead):
            self._state.rollback(len(self._ahead) - common)
            self._runs = [each for each in self._runs if each[0] <= self._final + common]
        del self._ahead[common:]
        rest = target[common:]
        end = next((place for place, token in enumerate(rest) if token in self._eos_ids), len(rest))
        consumed = self._state.try_consume_tokens(rest[:end]) if end else 0
        self._require_bounded()
        self._ahead += rest[:consumed]
        if consumed < end and self._final + len(self._ahead) < number:
            raise StructureError(
                f"structure: token {rest[consumed]} of the answer is outside of it; choose another one"
            )
        if self._final < number <= self._final + len(self._ahead):
            del self._ahead[: number - self._final]
            self._final = number
            self._runs = [each for each in self._runs if each[0] + len(each[1]) > number]
        return consumed == len(rest)

    def _require_bounded(self) -> None:
        if self._state.is_error():
            raise StructureError("structure: it has become too complex to follow; simplify it")
