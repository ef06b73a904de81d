"""Chooses before every cycle what is expected to bring most tokens a second: the heart of `auto`."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from ssd_profiles.latency import LatencyTable
from ssd_runtime.drafting.lookup import Lookup, LookupStats, Ready
from ssd_runtime.engine.session import Load
from ssd_runtime.planning.auto.budget import Budget
from ssd_runtime.planning.auto.draft_stats import DraftStats
from ssd_runtime.planning.auto.offer import Offer, Source
from ssd_runtime.planning.auto.planning_time import PlanningTime
from ssd_runtime.planning.auto.verify_stats import VerifyStats
from ssd_runtime.planning.cost import cost_of, under_load
from ssd_runtime.planning.lookup import MOST_ROWS, best_guess, row_costs
from ssd_runtime.planning.plan import Cycle, Plan


def _records() -> defaultdict[str, DraftStats]:
    return defaultdict(DraftStats)


@dataclass(slots=True)
class Stream:
    """What `auto` has learned from one stream of requests; it outlives a request: this planner's declared state."""

    lookup: LookupStats = field(default_factory=LookupStats)
    budget: Budget = field(default_factory=Budget)
    planning: PlanningTime = field(default_factory=PlanningTime)
    verify: VerifyStats = field(default_factory=VerifyStats)
    masks: defaultdict[str, DraftStats] = field(default_factory=_records)
    """By domain."""
    exits: defaultdict[str, DraftStats] = field(default_factory=_records)
    """By domain."""


UNPLANNED = Plan("plain: not planned, since planning has used its share of the time")


class Controller:
    """One request's choices.

    Guesses that cost no draft step come first, and as many as their probabilities and the verification curve make
    pay; drafts by the model itself where those promise more; else a plain step. Nothing is chosen whose failure the
    stream's budget does not cover. Deciding takes time, too, which the budget bounds: where that brings nothing on a
    fast device, only some steps are planned.
    """

    def __init__(
        self,
        latency: LatencyTable,
        stream: Stream,
        lookup: Lookup,
        sources: Sequence[Source] = (),
    ) -> None:
        """`lookup` has the prompt taken in; `sources` may use it to go on with guesses behind their drafts."""
        self._stream, self._lookup, self._sources = stream, lookup, sources
        self._table = row_costs(latency)
        self._chosen: Offer | None = None
        self._costs: list[float] = []
        self._rows = 1
        """This request's in the latest forward."""
        self.planned = False
        """Whether the latest plan was decided on, and did not just fill in for one."""

    def plan(self, context: int, pending: int, load: Load | None = None) -> Plan:
        """What to do after `context` committed tokens and the pending one, where a forward is shared as `load` says."""
        budget, table = self._stream.budget, self._table.at(context)
        self._lookup.catch_up(context, pending)
        costs, most_cost = self._stream.verify.priced(table), budget.most_cost
        if load is not None and load.sequences > 1:
            costs = under_load(costs, load.sequences, max(load.rows - self._rows, load.sequences - 1))
        self._chosen, self._costs, self.planned = None, costs, budget.covers_planning
        if not self.planned:
            return UNPLANNED
        if not self._stream.verify.settled:
            return Plan("plain: what a step takes here is not known yet")
        guess = best_guess(self._lookup, costs, MOST_ROWS, most_cost)
        # Steps of a draft would hold up every other sequence: where several decode, only guesses are worth it.
        sources = self._sources if load is None or load.sequences == 1 else ()
        offers = [offer for source in sources if (offer := source.offer(context, costs, most_cost)) is not None]
        # What the budget does not cover yet is saved for: spent on the second best, it would never come together.
        best = max(offers, key=lambda offer: offer.source.record.discounted(offer.best), default=None)
        if best is not None and best.plan is not None and best.speedup >= guess.speedup:
            self._chosen = best
            return best.plan
        if guess.tree:
            detail = f"{len(guess.tree)} guesses, {guess.speedup:.2f}x"
            return Plan("lookup", Ready(guess.tree), MOST_ROWS, detail=detail)
        credit = f"{budget.credit:.1f} plain steps may be lost"
        return Plan("plain: no draft that the budget covers is expected to be faster", detail=credit)

    def observe(self, cycle: Cycle) -> None:
        """Take in what came of the plan."""
        if self.planned:
            self._lookup.learn(cycle.tokens)
        else:
            self._lookup.extend(cycle.tokens)
        tokens, row = len(cycle.tokens), min(cycle.verified, len(self._costs)) - 1
        # Where no room was left to draft, the offer came to nothing.
        chosen = self._chosen if cycle.steps or cycle.begun else None
        verify = self._stream.verify
        cost = self._costs[row] if chosen is None else chosen.source.learn(cycle, self._costs, verify.plain_seconds)
        for source in self._sources:
            if chosen is None or source is not chosen.source:
                source.record.rest(tokens)
            else:
                source.record.settle(tokens, cost)
        table, sequences = self._table.at(cycle.context), 1
        shared = cycle.verified
        if cycle.load is not None:
            sequences, shared = cycle.load.sequences, cycle.load.rows
        self._rows = cycle.verified
        if not cycle.begun:
            verify.update(shared, cycle.verify_seconds, cost_of(table, shared))
        planning = self._stream.planning.update(cycle.plan_seconds) if self.planned else 0.0
        # Every sequence waits while one is planned.
        step = (verify.plain_seconds or math.inf) * cost_of(table, shared - cycle.verified + 1) / sequences
        self._stream.budget.settle(tokens, cost, planning / step)
