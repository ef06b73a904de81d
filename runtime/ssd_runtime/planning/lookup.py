"""Plans drafts by prompt lookup and token recycling, which cost no model step: as many as are worth verifying."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ssd_profiles.latency import LatencyTable
from ssd_runtime.drafting.lookup import Lookup, LookupStats, Node, Ready
from ssd_runtime.planning.cost import CostModel
from ssd_runtime.planning.plan import Cycle, Plan, Planner
from ssd_runtime.planning.settings import MOST_GUESSES, LookupSettings
from ssd_runtime.planning.strategy import MakePlanner, StrategyInputs
from ssd_runtime.sequence.prefill import Prefill
from ssd_runtime.sequence.session import Session


@dataclass(frozen=True, slots=True)
class Guess:
    """The part of a tree of guesses that is worth its verification."""

    tree: tuple[Node, ...]
    tokens: float = 1.0
    """Expected tokens of the cycle, the target's own token included."""
    cost: float = 1.0
    """Cost of the verification, in plain steps."""

    @property
    def speedup(self) -> float:
        """Expected tokens per plain step's time."""
        return self.tokens / self.cost


def worth_verifying(tree: Sequence[Node], costs: Sequence[float], most_cost: float) -> Guess:
    """The prefix of `tree` with the most expected tokens/s whose cost is at most `most_cost`, or its certain tokens.

    costs[n] is the cost of verifying n guesses. A guess adds its probability to the tokens of a cycle. Costs rise in
    steps, so every length is tried.
    """
    best = 0
    best_tokens = tokens = certain = 1.0
    best_rate = tokens / costs[0]
    for length, node in enumerate(tree[: len(costs) - 1], start=1):
        tokens += node.probability
        certain += node.probability == 1.0
        cost = costs[length]
        # What is certain to come back is no loss.
        if cost <= max(most_cost, certain) and tokens / cost > best_rate:
            best = length
            best_tokens = tokens
            best_rate = tokens / cost
    return Guess(tuple(tree[:best]), best_tokens, costs[best])


def best_guess(lookup: Lookup, costs: Sequence[float], depth: int, most_cost: float, path: Sequence[int] = ()) -> Guess:
    """The guesses worth verifying after the tokens that `lookup` has read and `path`, at most `depth` tokens deep."""
    # Growing takes most of the time of planning, so no row is grown that could not pay even if all were right.
    most = min(MOST_GUESSES, len(costs) - 1)
    bound = float("inf") if lookup.follows_grammar else most_cost
    while most and (costs[most] > bound or costs[most] >= (1.0 + most) * costs[0]):
        most -= 1
    return worth_verifying(lookup.grow(path, most, depth) if most else (), costs, most_cost)


class LookupPlanner(Planner):
    """Plans a tree of guesses each cycle, or a plain step if none is worth its verification."""

    def __init__(self, latency: LatencyTable, settings: LookupSettings, stats: LookupStats) -> None:
        self._costs = CostModel(latency)
        self._settings = settings
        self._lookup = Lookup(stats, bool(settings.recycle))
        self.successors = stats.successors if settings.recycle else None
        self._session: Session | None = None

    def start(self, session: Session, prompt: Prefill) -> None:
        """Let the lookup read the prompt."""
        self._session = session
        self._lookup.start(session.ids, session.matcher)

    def plan(self, context: int) -> Plan:
        """Plan the best tree of guesses."""
        depth = self._settings.max_draft
        assert self._session is not None, "start() comes first"
        self._lookup.observe_first(context, self._session.pending)
        costs = self._costs.rows(context)
        guess = best_guess(self._lookup, costs=costs, depth=depth, most_cost=float("inf"))
        if not guess.tree:
            return Plan("plain: no guess is worth its verification")
        return Plan("lookup", Ready(guess.tree), depth)

    def observe(self, cycle: Cycle, states: list[Tensor] | None) -> None:
        """Update the rates of guesses with the cycle's tokens."""
        self._lookup.observe(cycle.tokens)


def make_lookup(inputs: StrategyInputs) -> MakePlanner:
    """Return a maker of lookup planners, which share the stream's statistics."""
    latency = inputs.measured_latency
    stats = inputs.make_lookup_stats()
    return lambda: LookupPlanner(latency, inputs.settings, stats)
