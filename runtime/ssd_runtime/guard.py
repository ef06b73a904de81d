"""Falls back to plain decoding when speculation is measured to be slower."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from ssd_runtime.planning.plan import Cycle

WINDOW_TOKENS = 24
"""Tokens over which the speed of speculation is judged."""
STOP_BELOW = 0.97
FIRST_REST = 16
LONGEST_REST = 512


@dataclass(slots=True)
class Guard:
    """Judges recent cycles against plain decoding; after a loss it orders a rest, twice as long each time.

    The stop (below 0.97 of plain decoding over the window) and the rest make a hysteresis: one bad cycle does not
    stop speculation and one good one does not bring it back. The price of a plain step is what plain steps of this
    request took, else what the latency table says, scaled by how verifications compare with it just now: a machine
    that is slow for a while slows both.
    """

    rest: int = 0
    """Plain tokens still to be decoded before speculation is tried again."""
    _window: deque[tuple[int, float, float]] = field(default_factory=deque)
    _next_rest: int = FIRST_REST

    def observe(self, cycle: Cycle, plain_seconds: float, verify_seconds: float) -> None:
        """Take in a cycle; the table gives `plain_seconds` for a plain step, `verify_seconds` for its verification."""
        if cycle.drafted == 0:
            self.rest = max(0, self.rest - len(cycle.tokens))
            return
        machine = cycle.verify_seconds / verify_seconds
        self._window.append((len(cycle.tokens), cycle.seconds, plain_seconds * machine))
        while sum(tokens for tokens, _, _ in self._window) > WINDOW_TOKENS + self._window[0][0]:
            self._window.popleft()
        if sum(tokens for tokens, _, _ in self._window) >= WINDOW_TOKENS:
            self._judge()

    def _judge(self) -> None:
        spent = sum(seconds for _, seconds, _ in self._window)
        plain = sum(tokens * seconds for tokens, _, seconds in self._window)
        if plain / spent < STOP_BELOW:
            self.rest = self._next_rest
            self._next_rest = min(2 * self._next_rest, LONGEST_REST)
            self._window.clear()
