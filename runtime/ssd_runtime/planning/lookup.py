"""Prompt lookup and token recycling: drafts that cost no step of the model, as many as pay to verify."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ssd_profiles.latency import LatencyTable
from ssd_runtime.drafting.lookup import Lookup, LookupStats, Node, Ready
from ssd_runtime.engine.session import Prefill, Session
from ssd_runtime.planning.cost import CostModel
from ssd_runtime.planning.plan import BasePlanner, Cycle, Plan
from ssd_runtime.planning.settings import LookupSettings

MOST_ROWS = 24
"""Guesses verified at once: growing more of them takes time, and none so improbable has ever paid."""


@dataclass(frozen=True, slots=True)
class Guess:
    """The part of a tree of guesses that is worth its verification."""

    tree: tuple[Node, ...]
    tokens: float = 1.0
    """Expected of the cycle, the target's own token included."""
    cost: float = 1.0
    """Of the verification, in plain steps."""

    @property
    def speedup(self) -> float:
        """Expected against plain decoding."""
        return self.tokens / self.cost


def worth_verifying(tree: Sequence[Node], costs: Sequence[float], most_cost: float) -> Guess:
    """The beginning of `tree` of most tokens a second; costs[n] is what verifying n guesses costs.

    A guess adds its probability to the tokens of a cycle. Costs rise in steps, so every length is tried.
    """
    best, tokens = Guess((), cost=costs[0]), 1.0
    for length, node in enumerate(tree[: len(costs) - 1], start=1):
        tokens += node.probability
        cost = costs[length]
        if cost <= most_cost and tokens / cost > best.speedup:
            best = Guess(tuple(tree[:length]), tokens, cost)
    return best


def best_guess(lookup: Lookup, costs: Sequence[float], depth: int, most_cost: float) -> Guess:
    """The guesses that are worth verifying after the tokens that `lookup` has."""
    # Of rows that could not pay if all of them were right, none is grown: that takes the most time of planning.
    lengths = range(1, min(MOST_ROWS + 1, len(costs)))
    most = max((n for n in lengths if costs[n] <= most_cost and costs[n] < (1.0 + n) * costs[0]), default=0)
    return worth_verifying(lookup.grow((), most, depth) if most else (), costs, most_cost)


class LookupPlanner(BasePlanner):
    """A tree of guesses each cycle; a plain step where none is worth its verification."""

    def __init__(self, latency: LatencyTable, settings: LookupSettings, record: LookupStats) -> None:
        self._costs, self._settings = CostModel(latency), settings
        self._lookup = Lookup(record, bool(settings.recycle))
        self.successors = record.successors if settings.recycle else None

    def start(self, session: Session, prompt: Prefill) -> None:
        """Take in the prompt."""
        self._lookup.open(session.ids)

    def plan(self, context: int, pending: int) -> Plan:
        """The best tree of guesses."""
        depth = self._settings.max_draft
        self._lookup.catch_up(context, pending)
        guess = best_guess(self._lookup, self._costs.rows(context), depth, float("inf"))
        if not guess.tree:
            return Plan("plain: no guess is worth its verification")
        return Plan("lookup", Ready(guess.tree), depth)

    def observe(self, cycle: Cycle, states: list[Tensor] | None) -> None:
        """Let the lookup learn which guesses were right."""
        self._lookup.learn(cycle.tokens)
