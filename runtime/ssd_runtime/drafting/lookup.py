"""Drafts that copy what followed the same tokens before (prompt lookup)."""

from __future__ import annotations

from ssd_profiles.formulas import tokens_per_time
from ssd_profiles.latency import LatencyTable
from ssd_runtime.drafting.draft import Draft
from ssd_runtime.ngrams import LONGEST, NgramIndex
from ssd_runtime.planning.throughput import StepCosts
from ssd_runtime.session import Session

PRIOR = (0.35, 0.55, 0.65, 0.72, 0.77, 0.8, 0.82, 0.85)
"""Token agreement by length of match, before anything is known of a request."""
PRIOR_WEIGHT = 6.0
"""Tokens that the prior counts for."""
KEEP = 0.97
"""What share of its record a new cycle leaves: requests change as they go."""
RECOSTED_TOKENS = 64
"""Verification is priced again where the context has grown by so many."""


class Lookup:
    """Longest match first; as many tokens as bring most a second, by match length, record and latency.

    One object serves one request. It costs no step of the model.
    """

    def __init__(self, latency: LatencyTable) -> None:
        self._latency = latency
        self._index = NgramIndex()
        self._right = [PRIOR_WEIGHT * agreement for agreement in PRIOR]
        self._asked = [PRIOR_WEIGHT] * LONGEST
        self._match = 0
        self._costs = StepCosts.at(latency, 0)
        self._until = 0

    def draft(self, session: Session, pending: int, length: int) -> Draft:
        """Up to `length` tokens; none where nothing matches or no length pays."""
        known = len(self._index.tokens)
        if known <= session.committed:
            self._index.extend([*session.ids[known:], pending])
        self._match = self._index.match
        if not self._match:
            return Draft([])
        agreement = self._right[self._match - 1] / self._asked[self._match - 1]
        return Draft(self._index.continuation(self._best_length(agreement, session.committed, length)))

    def observe(self, drafted: int, accepted: int) -> None:
        """Take in how the last draft fared: the tokens that stood, and the first that did not."""
        if drafted:
            place, asked = self._match - 1, min(drafted, accepted + 1)
            self._right[place] = KEEP * self._right[place] + accepted
            self._asked[place] = KEEP * self._asked[place] + asked

    def _best_length(self, agreement: float, context: int, most: int) -> int:
        """The draft length of highest TPT, drafts being free; 0 where a plain step is better."""
        if context >= self._until:
            self._costs, self._until = StepCosts.at(self._latency, context), context + RECOSTED_TOKENS
        rates = [
            tokens_per_time(agreement, length, 0.0, float(self._costs.verification(length)))
            for length in range(most + 1)
        ]
        return rates.index(max(rates))
