"""Drafts by the model itself, without the sub-layers of a mask."""

from __future__ import annotations

import math

from ssd_profiles.mask import SkipMask
from ssd_runtime.session import Session


def draft_masked(session: Session, pending: int, mask: SkipMask, length: int, threshold: float) -> list[int]:
    """Up to `length` tokens behind `pending`, each the masked model's most probable.

    Ends behind the first token whose probability is below `threshold` (Self-SD's and KnapSpec's early stop): that
    token is drafted already and costs only its place in the verification, so it stays in. Keys and values go
    past the committed ones, where verification overwrites them.
    """
    decoder, drafted, token = session.decoder, list[int](), pending
    unsure = math.log(threshold) if threshold > 0.0 else -math.inf
    while len(drafted) < length:
        x = session.forward([token], mask, ahead=len(drafted))
        logits = decoder.logits(x)[0]
        top, best = logits.max(-1)
        token = int(best)
        drafted.append(token)
        if threshold > 0.0 and float(top.float() - logits.float().logsumexp(-1)) < unsure:
            break
    return drafted
