"""Statistics of the model's drafts, against the predictions for them."""

from __future__ import annotations

from dataclasses import dataclass

from ssd_runtime.planning.auto.budget import MOST, PER_TOKEN

OUTLIER = 3.0
"""Times are clipped at `OUTLIER` times what is expected: longer ones come from other processes."""
PRIOR_TOKENS = 48.0
"""Number of tokens that the prior counts as."""
KEEP = 0.98
"""Decay of the statistics per cycle."""
FORGET = 1 / 512
"""Decay toward the prior per token that was drafted otherwise, so that such drafts are tried again."""
FORGIVEN = 0.01
"""Distance from the prior below which the statistics count as the prior."""
PER_DEBT = 0.25
"""Reduction of a predicted speed-up per plain step lost."""
LEAST_PREDICTED = 1e-6
"""Least predicted tokens to divide by: a crafted bundle may predict none at all, and earlier predictions decay."""
MIN_GAIN = 1.02
"""Expected speed-up below which drafts of the model are not worth their risk."""
HYSTERESIS = 1.03
"""Drafts that are no longer trusted must promise `MIN_GAIN` times this."""


@dataclass(slots=True)
class DraftStats:
    """Statistics of one way to draft in one domain."""

    got: float = PRIOR_TOKENS
    """Decayed sum of tokens."""
    predicted: float = PRIOR_TOKENS
    """Decayed sum of predicted tokens."""
    pace: float = 1.0
    """Measured time of draft steps ÷ that of the latency table; for exits, of whole cycles."""
    trusted: bool = True
    """Whether the latest predicted speed-up was worth the risk."""
    balance: float = 0.0
    """Plain steps won (at most `MOST`) or lost. A loss decays half as fast as the request's budget grows, so that
    another way to draft gets its turn first."""

    @property
    def factor(self) -> float:
        """Tokens ÷ predicted tokens."""
        return self.got / max(self.predicted, LEAST_PREDICTED)

    def update_trust(self, speedup: float) -> bool:
        """Update whether drafts of this best predicted speed-up are worth their risk, and return it."""
        self.trusted = speedup >= MIN_GAIN * (1.0 if self.trusted else HYSTERESIS)
        return self.trusted

    def discounted(self, speedup: float) -> float:
        """A predicted speed-up, reduced by recent losses.

        Drafts that promise most and fail are tried only as often as the budget allows, so their statistics change
        slowly. Losses count at once, so that such drafts do not use up the whole budget.
        """
        return speedup + PER_DEBT * min(0.0, self.balance)

    def update_balance(self, tokens: int, cost: float) -> None:
        """Update the balance with a cycle's tokens and its cost in plain steps."""
        self.balance = min(MOST, self.balance + tokens - cost)

    def update(self, tokens: int, predicted: float, pace: float) -> None:
        """Update with a cycle's tokens, the predicted tokens and its pace."""
        self.got = KEEP * self.got + tokens
        self.predicted = KEEP * self.predicted + predicted
        self.pace += 0.1 * (min(max(pace, 0.5), OUTLIER * self.pace) - self.pace)

    def decay(self, tokens: int) -> None:
        """Decay toward the prior after `tokens` tokens that were drafted otherwise."""
        self.balance = max(self.balance, min(0.0, self.balance + tokens * PER_TOKEN / 2))
        share = min(1.0, tokens * FORGET)
        self.got += share * (self.predicted - self.got)
        self.pace += share * (1.0 - self.pace)
        self.trusted |= abs(self.factor - 1.0) < FORGIVEN and abs(self.pace - 1.0) < FORGIVEN
