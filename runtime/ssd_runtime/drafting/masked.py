"""Drafts by the model itself, without the sub-layers of a mask."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from ssd_profiles.mask import SkipMask
from ssd_runtime.drafting.draft import Draft
from ssd_runtime.session import Session

Branching = tuple[tuple[float, int], ...]
"""(p, k) by rising p: a place whose token has probability at most p is given k candidates, that token included."""
CHAIN: Branching = ()
MOST_SIBLINGS = 64
"""Siblings of a whole draft: a cache has room for a context twice over, and verifying more never pays."""


@dataclass(frozen=True, slots=True)
class Masked:
    """Each token is the masked model's most probable.

    Drafting ends behind the first token whose probability is below `threshold` (Self-SD's and KnapSpec's early stop):
    that token is drafted already and costs only its place in the verification, so it stays in.
    """

    mask: SkipMask
    threshold: float = 0.0
    branching: Branching = CHAIN

    def draft(self, session: Session, pending: int, length: int) -> Draft:
        """Up to `length` tokens, one step of the masked model each."""
        decoder, token = session.decoder, pending
        tokens, siblings = list[int](), list[list[int]]()
        room = MOST_SIBLINGS
        unsure = math.log(self.threshold) if self.threshold > 0.0 else -math.inf
        while len(tokens) < length:
            x = session.forward([token], self.mask, ahead=len(tokens))
            logits = decoder.logits(x)[0]
            top, best = logits.max(-1)
            token = int(best)
            tokens.append(token)
            if self.threshold <= 0.0 and not self.branching:
                continue
            surprise = float(top.float() - logits.float().logsumexp(-1))
            if self.branching:
                others = self._siblings(logits, math.exp(surprise), token)
                siblings.append(others[: max(0, room)])
                room -= len(others)
            if surprise < unsure:
                break
        return Draft(tokens, siblings)

    def _siblings(self, logits: Tensor, probability: float, token: int) -> list[int]:
        """The most probable tokens but `token`, as many as its probability asks for (SWIFT §4.2)."""
        count = next((k for bound, k in self.branching if probability <= bound), 1)
        if count < 2:
            return []
        best: list[int] = logits.topk(min(count, logits.shape[0])).indices.tolist()
        return [other for other in best if other != token][: count - 1]
