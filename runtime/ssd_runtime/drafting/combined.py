"""Masked drafts with more to verify: guesses behind them, and second candidates beside their unsure tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ssd_runtime.drafting.lookup import Lookup, Node, as_draft
from ssd_runtime.drafting.masked import Masked
from ssd_runtime.drafting.tree import Draft
from ssd_runtime.engine.session import Session
from ssd_runtime.model.runner import Work

MOST_GUESSES = 12
DEEPEST = 12
UNSURE_SHARE = 0.4
"""About so many of a mask's tokens are unsure; nearly all that are wrong are among these."""
SECOND_RIGHT = 0.8
"""Share of the wrong ones in whose place the second candidate is right."""


@dataclass(frozen=True, slots=True)
class Extended:
    """A masked chain, and as many rows besides as are worth their verification.

    Those are guesses behind its last token, where what was drafted has stood before, and the siblings that the
    masked drafter proposes. Each of them adds a token to the cycle if it stands.
    """

    masked: Masked
    chain: int
    """Most masked tokens."""
    lookup: Lookup
    """Of this request, with all its tokens read."""
    agreement: float
    """Probability that a masked token is right."""
    speedup: float
    """Tokens a plain step's time that speculation brings just now: what time is worth."""
    row_costs: tuple[float, ...]
    """Of a verification of 1, 2, … rows, in plain steps."""
    most_cost: float
    """What other rows may add to the verification of a whole chain."""

    def drafting(self, session: Session, pending: int, length: int) -> Work[Draft]:
        """Draft the chain, and guesses that go no deeper than `length` tokens behind `pending`."""
        wanted = min(length, self.chain)
        drafted = yield from self.masked.drafting(session, pending, wanted)
        steps = drafted.steps
        rows = self._siblings(drafted)
        # A chain that ended early ended in doubt: nothing is built on that.
        if steps == wanted and steps < length:
            chance = self.agreement**steps
            behind = self.lookup.grow(drafted.tokens[:steps], MOST_GUESSES, min(DEEPEST, length - steps))
            rows += [node._replace(probability=chance * node.probability, depth=steps + node.depth) for node in behind]
        # Guesses are less probable than those that they stand behind: what is kept is a tree.
        rows.sort(key=lambda node: -node.probability)
        kept = rows[: self._worth_adding(rows, steps)]
        return _joined(drafted, [node for node in kept if node.depth > steps], [n for n in kept if n.depth <= steps])

    def _siblings(self, drafted: Draft) -> list[Node]:
        """The drafter's siblings, by what must come true for them: all before right, the chain's wrong, this one right.

        `parent` and `depth` are those of the chain's token in whose place they stand.
        """
        if drafted.parents is None:
            return []
        steps = drafted.steps
        second = min(1.0, (1.0 - self.agreement) / UNSURE_SHARE) * SECOND_RIGHT
        pairs = zip(drafted.tokens[steps:], drafted.parents[steps:], strict=True)
        return [Node(token, place, self.agreement**place * second, place + 1) for token, place in pairs]

    def _worth_adding(self, rows: Sequence[Node], steps: int) -> int:
        """How many of `rows`, best first, exceed by most what the time of their verification could bring elsewhere."""
        best, gain, kept = 0.0, 0.0, 0
        most = len(self.row_costs) - 1 - steps
        for count, node in enumerate(rows[: max(0, most)], start=1):
            gain += node.probability
            cost = self.row_costs[steps + count] - self.row_costs[steps]
            if cost <= self.most_cost and gain - self.speedup * cost > best:
                best, kept = gain - self.speedup * cost, count
        return kept


def _joined(drafted: Draft, guesses: Sequence[Node], siblings: Sequence[Node]) -> Draft:
    """The chain of `drafted`, guesses behind its last token, siblings of its tokens."""
    steps = drafted.steps
    chain, parents = drafted.tokens[:steps], list(range(steps))
    if not guesses and not siblings:
        return Draft(chain, probs=drafted.probs, steps=steps)
    behind = as_draft(guesses, steps + DEEPEST)
    parents += [steps + parent for parent in behind.parents or ()]
    tokens = [*chain, *behind.tokens, *(node.token for node in siblings)]
    return Draft(tokens, [*parents, *(node.parent for node in siblings)], probs=drafted.probs, steps=steps)
