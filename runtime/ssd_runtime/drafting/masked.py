"""Drafts by the model itself, without the sub-layers of a mask."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from ssd_profiles.mask import SkipMask
from ssd_runtime.drafting.tree import Draft
from ssd_runtime.engine.session import Session
from ssd_runtime.model.runner import Head, Work
from ssd_runtime.sampling.argmax import candidates
from ssd_runtime.sampling.sampler import Proposal

Branching = tuple[tuple[float, int], ...]
"""(p, k) by rising p: a place whose token has probability at most p is given k candidates, that token included."""
CHAIN: Branching = ()
MOST_SIBLINGS = 64
"""Siblings of a whole draft: a cache has room for a context twice over, and verifying more never pays."""


@dataclass(frozen=True, slots=True)
class Masked:
    """Each token is the masked model's choice.

    Drafting ends behind the first token whose probability is below `threshold` (Self-SD's and KnapSpec's early stop):
    that token is drafted already and costs only its place in the verification, so it stays in.
    """

    mask: SkipMask
    threshold: float = 0.0
    branching: Branching = CHAIN

    def drafting(self, session: Session, pending: int, length: int) -> Work[Draft]:
        """Draft up to `length` tokens, one step of the masked model each."""
        tokens, siblings, probs = list[int](), list[list[int]](), list[Tensor]()
        room = MOST_SIBLINGS
        asked = 1.0 if self.threshold > 0.0 or self.branching else None
        unsure = -math.log(self.threshold) if self.threshold > 0.0 else math.inf
        while len(tokens) < length:
            x = yield session.request([tokens[-1] if tokens else pending], len(tokens), self.mask)
            [logits] = yield Head(x)
            proposal = session.propose(logits, lambda: [pending, *tokens], asked)
            tokens.append(proposal.token)
            if proposal.probs is not None:
                probs.append(proposal.probs)
            if self.branching:
                others = self._siblings(proposal)
                siblings.append(others[: max(0, room)])
                room -= len(others)
            if proposal.nll > unsure:
                break
        return Draft.branching(tokens, siblings, probs)

    def _siblings(self, proposal: Proposal) -> list[int]:
        """The best tokens but the one proposed, as many as its probability asks for (SWIFT §4.2)."""
        probability = math.exp(-proposal.nll)
        count = next((k for bound, k in self.branching if probability <= bound), 1)
        if count < 2:
            return []
        best = candidates(proposal.scores[None], [0], count)[0]
        return [other for other in best if other != proposal.token][: count - 1]
