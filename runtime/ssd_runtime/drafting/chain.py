"""Chains of draft steps, with second candidates beside their unsure tokens."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from ssd_artifacts.domain_config import MAX_DRAFT
from ssd_runtime.drafting.on_device import DeviceChain, Step, is_unsure
from ssd_runtime.drafting.tree import Draft, Origin
from ssd_runtime.model.cache.kv_pool import SPARE_SLOTS
from ssd_runtime.model.runner import Work
from ssd_runtime.sampling.argmax import candidates
from ssd_runtime.sequence.session import Session

Branching = tuple[tuple[float, int], ...]
"""Pairs (p, k) with ascending p: a place whose token has a probability of at most p has k candidates in all."""
CHAIN: Branching = ()
MOST_SIBLINGS = SPARE_SLOTS - MAX_DRAFT - 1
"""Most siblings of a draft. With the longest draft and the token before it they fill the slots that each sequence has
to spare; verifying more never pays."""


class Chain(ABC):
    """A drafter whose tokens come from one step after the other.

    Drafting ends after the first token whose probability is below `threshold` (Self-SD's and KnapSpec's early stop).
    That token is part of the draft, since it costs only its row in the verification.
    """

    __slots__ = ()
    threshold: float
    branching: Branching

    @property
    @abstractmethod
    def origin(self) -> Origin:
        """The origin of its tokens."""

    @abstractmethod
    def stepping(self, session: Session) -> Step:
        """Return a function that runs the steps of one draft, in order."""

    def drafting(self, session: Session, length: int) -> Work[Draft]:
        """Draft up to `length` tokens, with one step each."""
        if session.reads_late:
            return (yield from self._drafting_on_device(session, length))
        tokens = list[int]()
        siblings = list[list[int]]()
        probs = list[Tensor]()
        # The confidence takes time, so it is computed only if it is used.
        temperature = 1.0 if self._needs_confidence else None
        most_nll = self._most_nll
        step = self.stepping(session)
        while len(tokens) < length:
            [logits] = yield from step([tokens[-1] if tokens else session.pending], len(tokens))
            proposal = session.propose(logits, lambda: [session.pending, *tokens], temperature)
            tokens.append(proposal.token)
            if proposal.probs is not None:
                probs.append(proposal.probs)
            if self.branching:
                count = self._count(proposal.nll)
                best = candidates(proposal.scores[None], [0], count)[0] if count > 1 else []
                siblings.append(_others(best, proposal.token, count))
            if is_unsure(proposal.nll, most_nll):
                break
        return Draft.branching(tokens, _within_room(siblings), probs, origin=self.origin)

    def _drafting_on_device(self, session: Session, length: int) -> Work[Draft]:
        """Draft the same tokens, or some more after an unsure one, with few reads by the host."""
        most = max((count for _, count in self.branching), default=0)
        chain = DeviceChain(step=self.stepping(session), confidence=self._needs_confidence, candidates=most)
        yield from chain.growing(session.pending, length, self._most_nll)
        if not self.branching and len(chain.read) < len(chain.steps):
            return Draft([], steps=len(chain.steps), origin=self.origin, unread=chain.tokens)
        yield from chain.reading(self._most_nll)
        siblings = [_others(step.best, step.token, self._count(step.nll)) for step in chain.read]
        return Draft.branching([step.token for step in chain.read], _within_room(siblings), origin=self.origin)

    def _count(self, nll: float) -> int:
        """Number of candidates that the probability of a proposed token asks for, its own included (SWIFT §4.2)."""
        probability = math.exp(-nll)
        return next((count for bound, count in self.branching if probability <= bound), 1)

    @property
    def _needs_confidence(self) -> bool:
        """Whether anything depends on the confidence in a token."""
        return self.threshold > 0.0 or bool(self.branching)

    @property
    def _most_nll(self) -> float:
        """The largest nll of a token after which drafting goes on."""
        return -math.log(self.threshold) if self.threshold > 0.0 else math.inf


def _others(best: Sequence[int], token: int, count: int) -> list[int]:
    """The first `count` - 1 tokens other than `token` among the `count` most probable ones."""
    return [other for other in best[:count] if other != token][: count - 1]


def _within_room(siblings: Sequence[list[int]]) -> list[list[int]]:
    """The siblings per token, without those beyond `MOST_SIBLINGS` in all."""
    room = MOST_SIBLINGS
    kept = list[list[int]]()
    for others in siblings:
        kept.append(others[: max(0, room)])
        room -= len(others)
    return kept
