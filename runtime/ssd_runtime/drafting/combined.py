"""Drafts by steps with further rows to verify: guesses after the chain, and siblings of its unsure tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ssd_runtime.drafting.lookup import Lookup, Node, as_draft
from ssd_runtime.drafting.tree import Draft, Drafter
from ssd_runtime.model.runner import Read, Work
from ssd_runtime.sequence.session import Session

MOST_GUESSES = 12
DEEPEST = 12
UNSURE_SHARE = 0.4
"""Approximate share of a mask's tokens that are unsure; they include nearly all wrong ones."""
SECOND_RIGHT = 0.8
"""Share of wrong tokens for which the second candidate is right."""


@dataclass(frozen=True, slots=True)
class Extended:
    """A chain of draft steps, with as many other rows as are worth their verification.

    These are guesses after its last token, where the drafted text has occurred before, and the siblings that the
    drafter proposes. Each one that is accepted adds a token to the cycle.
    """

    drafter: Drafter
    chain: int
    """Most tokens of the chain."""
    lookup: Lookup
    """The request's lookup, which has read all of its tokens."""
    agreement: float
    """Probability that a token of the chain is right."""
    speedup: float
    """Tokens per plain step's time that speculation yields at present, which is the value of time."""
    row_costs: tuple[float, ...]
    """Cost of verifying 1, 2, … rows, in plain steps."""
    most_cost: float
    """Most that other rows may add to the cost of verifying a whole chain, in plain steps."""

    def drafting(self, session: Session, length: int) -> Work[Draft]:
        """Draft the chain, and guesses at most `length` tokens after the pending one."""
        wanted = min(length, self.chain)
        drafted = yield from self.drafter.drafting(session, wanted)
        if drafted.unread is not None:  # guesses and siblings follow tokens that the host knows
            drafted = drafted.read((yield Read(drafted.unread)))
        steps = drafted.steps
        rows = self._siblings(drafted)
        # A chain that ended early ended in doubt, so nothing is built on it.
        if steps == wanted and steps < length:
            chance = self.agreement**steps
            guesses = self.lookup.grow(drafted.tokens[:steps], MOST_GUESSES, min(DEEPEST, length - steps))
            rows += [node._replace(probability=chance * node.probability, depth=steps + node.depth) for node in guesses]
        # A guess is less probable than its parent, so any best prefix is a tree.
        rows.sort(key=lambda node: -node.probability)
        kept = rows[: self._worth_adding(rows, steps)]
        return _joined(drafted, [node for node in kept if node.depth > steps], [n for n in kept if n.depth <= steps])

    def _siblings(self, drafted: Draft) -> list[Node]:
        """Siblings as nodes, whose probability is that all before is right, the chain's token wrong and this one right.

        `parent` and `depth` are those of the chain's token that the sibling replaces.
        """
        if drafted.parents is None:
            return []
        steps = drafted.steps
        second = min(1.0, (1.0 - self.agreement) / UNSURE_SHARE) * SECOND_RIGHT
        pairs = zip(drafted.tokens[steps:], drafted.parents[steps:], strict=True)
        return [
            Node(token=token, parent=place, probability=self.agreement**place * second, depth=place + 1)
            for token, place in pairs
        ]

    def _worth_adding(self, rows: Sequence[Node], steps: int) -> int:
        """Number of best `rows` that maximises expected tokens minus the value of the time to verify them."""
        best = 0.0
        gain = 0.0
        kept = 0
        most = len(self.row_costs) - 1 - steps
        for count, node in enumerate(rows[: max(0, most)], start=1):
            gain += node.probability
            cost = self.row_costs[steps + count] - self.row_costs[steps]
            if cost <= self.most_cost and gain - self.speedup * cost > best:
                best = gain - self.speedup * cost
                kept = count
        return kept


def _joined(drafted: Draft, guesses: Sequence[Node], siblings: Sequence[Node]) -> Draft:
    """Join the chain of `drafted`, guesses after its last token and siblings of its tokens into one draft."""
    steps = drafted.steps
    chain = drafted.tokens[:steps]
    parents = list(range(steps))
    if not guesses and not siblings:
        return Draft(chain, probs=drafted.probs, steps=steps, origin=drafted.origin)
    grown = as_draft(guesses, steps + DEEPEST)
    parents += [steps + parent for parent in grown.parents or ()]
    parents += [node.parent for node in siblings]
    tokens = chain + grown.tokens + [node.token for node in siblings]
    return Draft(tokens=tokens, parents=parents, probs=drafted.probs, steps=steps, origin=drafted.origin)
