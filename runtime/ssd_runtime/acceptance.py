"""Which drafted tokens stand, and which token follows them."""

from __future__ import annotations

from dataclasses import dataclass

from ssd_runtime.drafting.draft import Draft


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of one verification."""

    accepted: int
    """How many leading tokens of the chain stand."""
    next_token: int
    """The target's own token behind those that stand: a correction after a rejection, a bonus token otherwise."""
    sibling: int | None = None
    """The row of the sibling that stands behind the accepted chain, if one does."""

    @property
    def rows(self) -> list[int]:
        """The verified rows that stand, the pending token's first."""
        chain = list(range(self.accepted + 1))
        return chain if self.sibling is None else [*chain, self.sibling]


def accept_greedy(draft: Draft, target: list[int]) -> Verdict:
    """Accept the drafted tokens that are the target's own choices, up to the first that is not.

    `target` has an entry for every row: the most probable token behind it. Where the chain ends, a sibling that
    is the target's choice stands in its place, and the target's choice behind that follows.
    """
    tokens, accepted = draft.tokens, 0
    while accepted < len(tokens) and tokens[accepted] == target[accepted]:
        accepted += 1
    wanted = target[accepted]
    if accepted < len(draft.siblings) and wanted in draft.siblings[accepted]:
        row = 1 + len(tokens) + sum(map(len, draft.siblings[:accepted])) + draft.siblings[accepted].index(wanted)
        return Verdict(accepted, target[row], row)
    return Verdict(accepted, wanted)
