"""Drafts that cost no step of the model: copies of what followed before, and the target's own earlier candidates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

from ssd_runtime.drafting.ngrams import NgramIndex
from ssd_runtime.drafting.rates import Rate
from ssd_runtime.drafting.successors import Successors
from ssd_runtime.drafting.tree import NOTHING, Draft
from ssd_runtime.engine.session import Session
from ssd_runtime.model.runner import Work

COPY_PRIOR = (0.23, 0.36, 0.42, 0.47, 0.5, 0.52, 0.53, 0.55)
"""How often a copy is right, by length of match, before anything is known of a stream."""
FOLLOW_PRIOR = {False: (0.3, 0.12, 0.07, 0.05), True: (0.45, 0.15, 0.08, 0.05)}
"""How often a candidate of each rank is right, known behind the token alone (False) or behind the pair (True)."""
LEAST_PROBABLE = 0.12
"""Tokens less probable than this are not drafted."""


def _copy_rates() -> list[Rate]:
    return [Rate.prior(share) for share in COPY_PRIOR]


def _follow_rates() -> dict[tuple[bool, bool], list[Rate]]:
    return {
        (copied, pair): [Rate.prior(share) for share in FOLLOW_PRIOR[pair]]
        for copied in (False, True)
        for pair in (False, True)
    }


@dataclass(slots=True)
class LookupStats:
    """What a stream of requests has shown: candidates, and how often each kind of guess was right.

    Every new token is held against every guess there was for it, drafted or not: nothing has to be tried to be known.
    """

    successors: Successors = field(default_factory=Successors)
    copies: list[Rate] = field(default_factory=_copy_rates)
    """By length of match - 1."""
    follows: dict[tuple[bool, bool], list[Rate]] = field(default_factory=_follow_rates)
    """(Beside a copy, known behind the pair) to rates by rank."""


class Node(NamedTuple):
    """A token of a tree of guesses."""

    token: int
    parent: int
    """Row; 0 is what the tree grows behind."""
    probability: float
    """That it and all before it are right."""
    depth: int


class Lookup:
    """Grows trees of guesses behind one request's tokens."""

    def __init__(self, record: LookupStats, recycle: bool = True) -> None:
        self._record, self._recycle = record, recycle
        self._index = NgramIndex()

    @property
    def known(self) -> int:
        """Tokens taken in."""
        return len(self._index.tokens)

    def open(self, prompt: Sequence[int]) -> None:
        """Take in the prompt."""
        self._index.extend(prompt)

    def catch_up(self, context: int, pending: int) -> None:
        """Take in the token after a prompt of `context` tokens, of which no cycle tells."""
        if self.known == context:
            self.learn((pending,))

    def extend(self, tokens: Sequence[int]) -> None:
        """Take in the answer's next tokens alone, which costs less than to learn from them."""
        self._index.extend(tokens)

    def learn(self, tokens: Sequence[int]) -> None:
        """Take in the answer's next tokens, and whether they had been guessed."""
        for token in tokens:
            for guess, rate in self._guesses(()):
                rate.update(guess == token)
            self._index.extend((token,))

    def grow(self, path: Sequence[int], rows: int, depth: int) -> list[Node]:
        """Up to `rows` guesses behind the tokens taken in and `path`, the most probable ones, best first."""
        tree, order, behind = list[Node](), count(), tuple(path)
        heap: list[tuple[float, int, int, int, tuple[int, ...]]] = []

        def expand(row: int, behind: tuple[int, ...], probability: float, level: int) -> None:
            for token, rate in self._guesses(behind):
                chance = probability * rate.share
                if chance >= LEAST_PROBABLE:
                    heappush(heap, (-chance, next(order), row, level, (*behind, token)))

        expand(0, behind, 1.0, 1)
        while heap and len(tree) < rows:
            chance, _, parent, level, behind = heappop(heap)
            tree.append(Node(behind[-1], parent, -chance, level))
            if level < depth:
                expand(len(tree), behind, -chance, level + 1)
        return tree

    def _guesses(self, path: tuple[int, ...]) -> Iterator[tuple[int, Rate]]:
        """Each guess for the token behind `path`, with the record of its kind."""
        length, copied = self._index.after(path)
        if length:
            yield copied, self._record.copies[length - 1]
        behind = (*self._index.tokens[-2:], *path)[-2:]
        if not self._recycle or len(behind) < 2:
            return
        candidates, pair = self._record.successors.of(*behind)
        rates = self._record.follows[length > 0, pair]
        for candidate, rate in zip(candidates, rates, strict=False):
            if candidate != copied:
                yield candidate, rate


def as_draft(tree: Sequence[Node], depth: int) -> Draft:
    """The tree's rows down to a depth, the most probable path first: that counts as the main path."""
    children: dict[int, list[int]] = {}
    for row, node in enumerate(tree, start=1):
        # A parent is shallower than its children: what is left is a tree.
        if node.depth <= depth:
            children.setdefault(node.parent, []).append(row)
    if not children:
        return NOTHING
    # Depth first, best child first: the path of best children comes before everything beside it.
    placed, stack = dict[int, int]({0: 0}), list(reversed(children[0]))
    tokens, parents = list[int](), list[int]()
    while stack:
        row = stack.pop()
        node = tree[row - 1]
        tokens.append(node.token)
        parents.append(placed[node.parent])
        placed[row] = len(tokens)
        stack += reversed(children.get(row, []))
    return Draft(tokens, parents)


@dataclass(frozen=True, slots=True)
class Ready:
    """A tree that was grown when it was planned."""

    tree: tuple[Node, ...]

    def drafting(self, session: Session, pending: int, length: int) -> Work[Draft]:
        """Its rows up to a depth of `length`; no step of the model is needed."""
        yield from ()
        return as_draft(self.tree, length)
