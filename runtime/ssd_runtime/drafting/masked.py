"""Drafts by the model itself without the sub-layers of a mask, on lighter copies of its weights, or both."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from ssd_profiles.mask import SkipMask
from ssd_runtime.drafting.tree import Draft
from ssd_runtime.engine.sequence.session import Session
from ssd_runtime.model.runner import Head, Work
from ssd_runtime.sampling.argmax import candidates
from ssd_runtime.sampling.sampler import Proposal

Branching = tuple[tuple[float, int], ...]
"""Pairs (p, k) with ascending p: a place whose token has a probability of at most p has k candidates in all."""
CHAIN: Branching = ()
MOST_SIBLINGS = 64
"""Most siblings of a draft: a cache has room for twice the context, and verifying more never pays."""


@dataclass(frozen=True, slots=True)
class Masked:
    """A drafter whose tokens are the masked model's choices, or those of the `light` one.

    Drafting ends after the first token whose probability is below `threshold` (Self-SD's and KnapSpec's early stop).
    That token is part of the draft, since it costs only its row in the verification.
    """

    mask: SkipMask | None
    threshold: float = 0.0
    branching: Branching = CHAIN
    light: bool = False
    """Whether drafts run on the lighter copies of the weights."""

    def drafting(self, session: Session, pending: int, length: int) -> Work[Draft]:
        """Draft up to `length` tokens, with one step of the masked model each."""
        tokens = list[int]()
        siblings = list[list[int]]()
        probs = list[Tensor]()
        room = MOST_SIBLINGS
        # The confidence takes time, so it is computed only if it is used.
        temperature = 1.0 if self.threshold > 0.0 or self.branching else None
        most_nll = -math.log(self.threshold) if self.threshold > 0.0 else math.inf
        while len(tokens) < length:
            rows = [tokens[-1] if tokens else pending]
            x = yield session.request(rows, len(tokens), self.mask, light=self.light)
            [logits] = yield Head(x, light=self.light)
            proposal = session.propose(logits, lambda: [pending, *tokens], temperature)
            tokens.append(proposal.token)
            if proposal.probs is not None:
                probs.append(proposal.probs)
            if self.branching:
                others = self._siblings(proposal)
                siblings.append(others[: max(0, room)])
                room -= len(others)
            if proposal.nll > most_nll:
                break
        return Draft.branching(tokens, siblings, probs)

    def _siblings(self, proposal: Proposal) -> list[int]:
        """The best other tokens, as many as the probability of the proposed one asks for (SWIFT §4.2)."""
        probability = math.exp(-proposal.nll)
        count = next((k for bound, k in self.branching if probability <= bound), 1)
        if count < 2:
            return []
        best = candidates(proposal.scores[None], [0], count)[0]
        return [other for other in best if other != proposal.token][: count - 1]
