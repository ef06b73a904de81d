"""Masked drafts that go on with guesses where what was drafted has stood before."""

from __future__ import annotations

from dataclasses import dataclass

from ssd_runtime.drafting.draft import Draft
from ssd_runtime.drafting.lookup import Lookup, Node, as_draft
from ssd_runtime.drafting.masked import Masked
from ssd_runtime.session import Session

MOST_GUESSES = 12
DEEPEST = 12


@dataclass(frozen=True, slots=True)
class Extended:
    """A masked chain, and behind its last token as many guesses as are worth their verification."""

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
    """What guesses may add to the verification of a whole chain."""

    def draft(self, session: Session, pending: int, length: int) -> Draft:
        """The chain, and guesses that go no deeper than `length` tokens behind `pending`."""
        wanted = min(length, self.chain)
        chain = self.masked.draft(session, pending, wanted)
        steps = len(chain.tokens)
        assert chain.parents is None, "guesses go on with chains"
        if steps < wanted or steps == length:
            # A chain that ended early ended in doubt: nothing is built on that.
            return chain
        tree = self.lookup.grow(chain.tokens, MOST_GUESSES, min(DEEPEST, length - steps))
        guesses = self._worth_adding(tree, steps)
        if not guesses:
            return chain
        behind = as_draft(guesses, length - steps)
        assert behind.parents is not None, "a tree of guesses has parents"
        parents = [*range(steps), *(steps + parent for parent in behind.parents)]
        return Draft([*chain.tokens, *behind.tokens], parents, probs=chain.probs, steps=steps)

    def _worth_adding(self, tree: list[Node], steps: int) -> list[Node]:
        """The beginning of `tree` whose expected tokens exceed by most what its verification could bring elsewhere."""
        best, gain, kept = 0.0, 0.0, 0
        chance = self.agreement**steps
        most = len(self.row_costs) - 1 - steps
        for count, node in enumerate(tree[: max(0, most)], start=1):
            gain += chance * node.probability
            cost = self.row_costs[steps + count] - self.row_costs[steps]
            if cost <= self.most_cost and gain - self.speedup * cost > best:
                best, kept = gain - self.speedup * cost, count
        return tree[:kept]
