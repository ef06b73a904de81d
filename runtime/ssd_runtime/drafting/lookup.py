"""Drafts that need no model step: copies of earlier text, and the target's own earlier candidates (token recycling)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

from ssd_runtime.drafting.ngrams import NgramIndex
from ssd_runtime.drafting.successors import Successors
from ssd_runtime.drafting.tree import NOTHING, Draft
from ssd_runtime.model.runner import Work
from ssd_runtime.sequence.session import Session
from ssd_runtime.structure.matcher import Matcher

COPY_PRIOR = (0.23, 0.36, 0.42, 0.47, 0.5, 0.52, 0.53, 0.55)
"""Prior probability that a copy is right, by match length - 1."""
SUCCESSOR_PRIOR = {False: (0.3, 0.12, 0.07, 0.05), True: (0.45, 0.15, 0.08, 0.05)}
"""Prior probability that a successor is right, by rank: known after the token (False) or after the pair (True)."""
LEAST_PROBABLE = 0.12
"""Drafted tokens have at least this probability."""
KEEP = 0.995
"""Decay per case, since requests change over time."""
MOST_READ = 16_384
"""Most tokens that are read into the index at once, a tenth of a second, for which all other requests wait."""
PRIOR_WEIGHT = 6.0
"""Number of cases that the prior counts as."""


@dataclass(slots=True)
class Rate:
    """Exponentially decayed share of successes."""

    held: float
    cases: float

    @classmethod
    def prior(cls, share: float) -> Rate:
        """Create a rate from a prior belief."""
        return cls(PRIOR_WEIGHT * share, PRIOR_WEIGHT)

    @property
    def share(self) -> float:
        """Current estimate."""
        return self.held / self.cases

    def update(self, held: bool) -> None:
        """Add one case."""
        self.held = KEEP * self.held + held
        self.cases = KEEP * self.cases + 1.0


def _copy_rates() -> list[Rate]:
    return [Rate.prior(share) for share in COPY_PRIOR]


def _successor_rates() -> dict[tuple[bool, bool], list[Rate]]:
    return {
        (copied, pair): [Rate.prior(share) for share in SUCCESSOR_PRIOR[pair]]
        for copied in (False, True)
        for pair in (False, True)
    }


@dataclass(slots=True)
class LookupStats:
    """Statistics of a stream of requests: the successor table, and how often each kind of guess was right.

    Every new token is compared with every guess for it, drafted or not, so that nothing has to be tried out.
    """

    successors: Successors = field(default_factory=Successors)
    copy_rates: list[Rate] = field(default_factory=_copy_rates)
    """Rates of copies by match length - 1."""
    successor_rates: dict[tuple[bool, bool], list[Rate]] = field(default_factory=_successor_rates)
    """Rates of successors by rank, for each (there is a copy as well, known after the pair)."""


class Node(NamedTuple):
    """A token in a tree of guesses."""

    token: int
    parent: int
    """Row of the parent, counted from 1; 0 is the token that the tree follows."""
    probability: float
    """Probability that this token and all before it are right."""
    depth: int


class Lookup:
    """Grows trees of guesses after one request's tokens."""

    def __init__(self, stats: LookupStats, recycle: bool = True) -> None:
        self._stats = stats
        self._recycle = recycle
        self._index = NgramIndex()
        self._matcher: Matcher | None = None
        self._certain = Rate.prior(1.0)
        self._unread: list[int] = []
        """Tokens that are not in the index yet. They are added when guesses are made; there are none before all are."""

    @property
    def known(self) -> int:
        """Number of tokens known so far."""
        return len(self._index.tokens) + len(self._unread)

    @property
    def follows_grammar(self) -> bool:
        """Whether some guesses may be certain."""
        return self._matcher is not None

    def start(self, prompt: Sequence[int], matcher: Matcher | None = None) -> None:
        """Read the prompt; guesses are those tokens that the `matcher` of the answer's grammar allows."""
        self._unread.extend(prompt)
        self._matcher = matcher
        self._read()

    def observe_first(self, context: int, pending: int) -> None:
        """Read the first token after a prompt of `context` tokens, which belongs to no cycle."""
        if self.known == context:
            self.observe((pending,))

    def append(self, tokens: Sequence[int]) -> None:
        """Note the answer's next tokens without updating the rates, which is cheaper."""
        self._unread.extend(tokens)

    def observe(self, tokens: Sequence[int]) -> None:
        """Read the answer's next tokens and update the rates of the guesses for them."""
        if not self._read():
            self._unread.extend(tokens)
            return
        for token in tokens:
            for guess, rate in self._guesses(()):
                rate.update(guess == token)
            self._index.extend((token,))

    def grow(self, path: Sequence[int], rows: int, depth: int) -> list[Node]:
        """Grow the most probable guesses after the tokens read and `path`: at most `rows`, best first."""
        tree = list[Node]()
        if not self._read():
            return tree
        order = count()
        heap: list[tuple[float, int, int, int, tuple[int, ...]]] = []

        def expand(row: int, branch: tuple[int, ...], probability: float, level: int) -> None:
            for token, rate in self._guesses(branch):
                chance = probability * rate.share
                if chance >= LEAST_PROBABLE:
                    heappush(heap, (-chance, next(order), row, level, (*branch, token)))

        expand(row=0, branch=tuple(path), probability=1.0, level=1)
        while heap and len(tree) < rows:
            chance, _, parent, level, branch = heappop(heap)
            tree.append(Node(token=branch[-1], parent=parent, probability=-chance, depth=level))
            if level < depth:
                expand(row=len(tree), branch=branch, probability=-chance, level=level + 1)
        return tree

    def _read(self) -> bool:
        """Add tokens to the index, at most `MOST_READ`; returns whether all are in it."""
        if self._unread:
            self._index.extend(self._unread[:MOST_READ])
            del self._unread[:MOST_READ]
        return not self._unread

    def _guesses(self, path: tuple[int, ...]) -> Iterator[tuple[int, Rate]]:
        """Iterate over the guesses for the token after `path`, with the rate of each one's kind.

        The only token that a grammar allows is certain.
        """
        matcher = self._matcher
        if matcher is None:
            yield from self._free_guesses(path)
            return
        known = self._index.tokens
        if (forced := matcher.forced(known, path)) is not None:
            yield forced, self._certain
            return
        for token, rate in self._free_guesses(path):
            if matcher.allows(known, path, token):
                yield token, rate

    def _free_guesses(self, path: tuple[int, ...]) -> Iterator[tuple[int, Rate]]:
        length, copied = self._index.after(path)
        if length:
            yield copied, self._stats.copy_rates[length - 1]
        last = (*self._index.tokens[-2:], *path)[-2:]
        if not self._recycle or len(last) < 2:
            return
        candidates, pair = self._stats.successors.of(*last)
        rates = self._stats.successor_rates[length > 0, pair]
        for candidate, rate in zip(candidates, rates, strict=False):
            if candidate != copied:
                yield candidate, rate


def as_draft(tree: Sequence[Node], depth: int) -> Draft:
    """Convert the tree down to `depth` into a draft whose main path is the most probable one."""
    children: dict[int, list[int]] = {}
    for row, node in enumerate(tree, start=1):
        # Parents are shallower than their children, so the remaining nodes are a tree.
        if node.depth <= depth:
            children.setdefault(node.parent, []).append(row)
    if not children:
        return NOTHING
    # Nodes are placed depth first, best child first, so that the main path comes before all others.
    placed = dict[int, int]({0: 0})
    stack = list(reversed(children[0]))
    tokens = list[int]()
    parents = list[int]()
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
    """A drafter for a tree that was grown at planning time."""

    tree: tuple[Node, ...]

    def drafting(self, session: Session, length: int) -> Work[Draft]:
        """Draft the tree's rows down to a depth of `length`, without a model step."""
        yield from ()
        return as_draft(self.tree, length)
