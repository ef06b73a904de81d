"""What speculation may lose: a bound that holds however badly drafts fare."""

from __future__ import annotations

from dataclasses import dataclass

START, MOST = 1.5, 4.0
PER_TOKEN = 1 / 64


@dataclass(slots=True)
class Budget:
    """Credit in plain steps, for what a cycle takes beyond the plain steps that its tokens are worth.

    A cycle is allowed only when its greatest loss, all drafts rejected, is covered. Losses are paid from the credit,
    gains and a 64th of a plain step a token fill it up to `MOST`. It never falls below 0, so over any T tokens
    speculation loses at most `MOST` + T / 64 plain steps: 5 in 64 tokens, and in the long run 1 in 64.
    """

    credit: float = START

    @property
    def most_cost(self) -> float:
        """Plain steps that a cycle may cost, since it may turn out to yield a single token."""
        return 1.0 + self.credit

    def allows(self, cost: float) -> bool:
        """Whether a cycle may cost so many plain steps."""
        return cost <= self.most_cost

    def settle(self, tokens: int, cost: float) -> None:
        """Take in a cycle: what it yielded and what it cost, in plain steps."""
        self.credit = min(MOST, self.credit + tokens * (1.0 + PER_TOKEN) - cost)
