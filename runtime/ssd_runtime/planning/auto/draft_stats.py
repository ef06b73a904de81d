"""How drafts that the model makes have fared against what was predicted of them."""

from __future__ import annotations

from dataclasses import dataclass

from ssd_runtime.planning.auto.budget import MOST, PER_TOKEN

PRIOR_TOKENS = 48.0
"""Tokens that a prediction counts for."""
KEEP = 0.98
"""What share of a record one more cycle leaves."""
FORGET = 1 / 512
"""How much nearer to the prediction a record gets with every token that came without: such drafts are tried again."""
FORGIVEN = 0.01
"""A record this near to the prediction is as good as none."""
PER_DEBT = 0.25
"""What a lost plain step takes off a promise."""
LEAST_PREDICTED = 1e-6
"""Tokens: a crafted bundle may predict none at all, and what was predicted before fades."""
MIN_GAIN = 1.02
"""Expected speed-up below which drafts of the model are not worth their risk."""
HYSTERESIS = 1.03
"""What they must promise beyond that to be taken up again."""


@dataclass(slots=True)
class DraftStats:
    """The record of one way to draft in one domain."""

    got: float = PRIOR_TOKENS
    predicted: float = PRIOR_TOKENS
    pace: float = 1.0
    """Time of draft steps, of exits that of whole cycles, ÷ what the latency table says of it."""
    trusted: bool = True
    """Whether it was last expected to gain."""
    balance: float = 0.0
    """Plain steps that it has won (at most `MOST`) or lost. A loss is forgotten in twice the time in which the
    stream's budget makes up for it: another way to draft gets its turn before."""

    @property
    def factor(self) -> float:
        """Tokens ÷ those predicted."""
        return self.got / max(self.predicted, LEAST_PREDICTED)

    def update_trust(self, speedup: float) -> bool:
        """Whether drafts that promise this speed-up at best are worth their risk, however much the budget covers."""
        self.trusted = speedup >= MIN_GAIN * (1.0 if self.trusted else HYSTERESIS)
        return self.trusted

    def discounted(self, speedup: float) -> float:
        """A promise, by what has been lost on such lately.

        What promises most and fails is tried only as often as the budget allows, and the record learns as slowly: so
        that it does not keep the budget for itself, debts count at once.
        """
        return speedup + PER_DEBT * min(0.0, self.balance)

    def settle(self, tokens: int, cost: float) -> None:
        """Take in what a cycle yielded and what it cost, in plain steps."""
        self.balance = min(MOST, self.balance + tokens - cost)

    def update(self, tokens: int, predicted: float, pace: float) -> None:
        """One more cycle."""
        self.got, self.predicted = KEEP * self.got + tokens, KEEP * self.predicted + predicted
        self.pace += 0.1 * (min(max(pace, 0.5), 2.0) - self.pace)

    def rest(self, tokens: int) -> None:
        """So many tokens came without it."""
        self.balance = max(self.balance, min(0.0, self.balance + tokens * PER_TOKEN / 2))
        share = min(1.0, tokens * FORGET)
        self.got += share * (self.predicted - self.got)
        self.pace += share * (1.0 - self.pace)
        self.trusted |= abs(self.factor - 1.0) < FORGIVEN and abs(self.pace - 1.0) < FORGIVEN
