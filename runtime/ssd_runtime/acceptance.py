"""Which drafted tokens stand, and which token follows them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of one verification."""

    accepted: int
    """How many leading draft tokens stand."""
    next_token: int
    """The target's own token behind them: a correction after a rejection, a bonus token otherwise."""


def accept_greedy(draft: list[int], target: list[int]) -> Verdict:
    """Accept the draft tokens that are the target's own choices, up to the first that is not.

    `target` has one entry more than `draft`: target[i] is the most probable token behind draft[:i].
    """
    accepted = 0
    while accepted < len(draft) and draft[accepted] == target[accepted]:
        accepted += 1
    return Verdict(accepted, target[accepted])
