"""Chooses before every cycle what is expected to bring most tokens a second: the heart of `auto`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from ssd_profiles.latency import LatencyTable
from ssd_profiles.mask import SkipMask
from ssd_runtime.drafting.lookup import Lookup, Ready
from ssd_runtime.engine.session import Load
from ssd_runtime.planning.auto.masked_drafts import MaskedDrafts
from ssd_runtime.planning.auto.offer import Offer, Source
from ssd_runtime.planning.auto.shared_step import ChainYield, Member
from ssd_runtime.planning.auto.stream import Stream
from ssd_runtime.planning.cost import CostModel
from ssd_runtime.planning.lookup import MOST_ROWS, Guess, best_guess
from ssd_runtime.planning.plan import Cycle, Plan

PLAIN_COSTS = [1.0]
"""Of a cycle that is not planned: it is a plain step."""
UNPLANNED = Plan("plain: not planned, since planning has used its share of the time")
UNKNOWN_LOAD = Plan("plain: others decode, and what a step takes with them is not known yet")
UNSETTLED = Plan("plain: what a step takes here is not known yet")


class Controller:
    """One request's choices.

    Guesses that cost no draft step come first, and as many as their probabilities and the verification curve make
    pay; drafts by the model itself where those promise more; else a plain step. Where several sequences share their
    steps, those of the stream decide together who drafts by masks (`shared_step`), and early exits are left out.
    Nothing is chosen whose failure the request's budget does not cover. Deciding takes time, too, which the budget
    bounds: where that brings nothing on a fast device, only some steps are planned.
    """

    def __init__(
        self,
        latency: LatencyTable,
        stream: Stream,
        lookup: Lookup,
        sources: Sequence[Source] = (),
        common: Sequence[MaskedDrafts] = (),
    ) -> None:
        """`lookup` has the prompt taken in; `sources` may use it to go on with guesses behind their drafts.

        `common` are the masks that it can draft with together with other requests, the preferred ones first.
        """
        self._stream, self._lookup, self._sources, self._common = stream, lookup, sources, common
        self._prices = CostModel(latency, stream.verify)
        self.budget = stream.budgets.take()
        self._number = stream.steps.join()
        self._running = True
        self._chosen: Offer | None = None
        self._costs = PLAIN_COSTS
        self._after: int | None = None
        """The number of the shared step that the latest plan follows; None where this request is alone."""
        self.planned = False
        """Whether the latest plan was decided on, and did not just fill in for one."""

    def plan(self, context: int, pending: int, load: Load | None = None) -> Plan:
        """What to do after `context` committed tokens and the pending one, where a forward is shared as `load` says."""
        stream, first = self._stream, self._lookup.known == context
        self._lookup.catch_up(context, pending)
        shared = load if load is not None and load.sequences > 1 else None
        self._after = shared.step if shared is not None else None
        self._chosen, self._costs, self.planned = None, PLAIN_COSTS, self.budget.covers_planning
        if not self.planned or not stream.verify.settled:
            self._offer_guess(Guess(()), most_cost=1.0)
            return UNSETTLED if self.planned else UNPLANNED
        self._costs = self._prices.rows(context) if shared is None else self._under_load(context, shared)
        if load is None and first and len(stream.steps.members) > 1:
            return UNKNOWN_LOAD
        guess = best_guess(self._lookup, self._costs, MOST_ROWS, self.budget.most_cost)
        offer = self._own(context) if shared is None else self._part(context, shared, guess)
        if offer is not None and offer.plan is not None and offer.speedup >= guess.speedup:
            self._chosen = offer
            return offer.plan
        if guess.tree:
            detail = f"{len(guess.tree)} guesses, {guess.speedup:.2f}x"
            return Plan("lookup", Ready(guess.tree), MOST_ROWS, detail=detail)
        credit = f"{self.budget.credit:.1f} plain steps may be lost"
        return Plan("plain: no draft that the budget covers is expected to be faster", detail=credit)

    def _under_load(self, context: int, load: Load) -> list[float]:
        """What this request's rows cost beside the others'; who comes first in a step works it out for all."""
        if self._stream.priced is None or self._stream.priced[0] is not load:
            others = max(round(load.rows * (1 - 1 / load.sequences)), load.sequences - 1)
            self._stream.priced = load, self._prices.rows_under_load(context, load.sequences, others)
        return self._stream.priced[1]

    def _own(self, context: int) -> Offer | None:
        """The best that the model can draft for this request alone."""
        offers = [
            offer
            for source in self._sources
            if (offer := source.offer(context, self._costs, self.budget.most_cost)) is not None
        ]
        # What the budget does not cover yet is saved for: spent on the second best, it would never come together.
        return max(offers, key=lambda offer: offer.source.record.discounted(offer.best), default=None)

    def _part(self, context: int, load: Load, guess: Guess) -> Offer | None:
        """This request's part in what the requests of the stream draft together; None where it has none."""
        steps, most_cost = self._stream.steps, self.budget.most_cost
        if not steps.worth_deciding(load.step):
            self._offer_guess(guess, most_cost)
            return None
        found = [each for source in self._common if (each := source.yields(context, load.sequences)) is not None]
        masks = dict[SkipMask, tuple[ChainYield, ...]]()
        for mask, chains in found:
            masks.setdefault(mask, chains)
        steps.members[self._number] = Member(
            tokens=guess.tokens, rows=1 + len(guess.tree), most_cost=most_cost, masks=masks, asked=True
        )
        steps.decide(load.step, self._prices, context, load.sequences)
        share = steps.share(self._number)
        if share is None:
            return None
        offers = (source.take_part(share, self._costs, most_cost) for source in self._common)
        return next((offer for offer in offers if offer is not None), None)

    def _offer_guess(self, guess: Guess, most_cost: float) -> None:
        """Tell the others what this request verifies by itself; its masks are those that it last spoke of."""
        members = self._stream.steps.members
        members[self._number] = replace(
            members[self._number], tokens=guess.tokens, rows=1 + len(guess.tree), most_cost=most_cost
        )

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
        sequences, rows = 1, cycle.verified
        if cycle.load is not None:
            sequences, rows = cycle.load.sequences, cycle.load.rows
        for source in self._sources if sequences == 1 else dict.fromkeys((*self._sources, *self._common)):
            if chosen is None or source is not chosen.source:
                source.record.rest(tokens)
            else:
                source.record.settle(tokens, cost)
        # A verification that had to wait for drafts of others tells nothing of its rows.
        if not cycle.begun and not self._stream.steps.drafted_after(self._after):
            verify.update(rows, cycle.verify_seconds, self._prices.shared_step(cycle.context, rows, sequences))
        planning = self._stream.planning.update(cycle.plan_seconds) if self.planned else 0.0
        # Every sequence waits while one is planned.
        plainly = self._prices.shared_step(cycle.context, rows - cycle.verified + 1, sequences)
        step = (verify.plain_seconds or math.inf) * plainly / sequences
        self.budget.settle(tokens, cost, planning / step)

    def finish(self) -> None:
        """Hand the budget on: the request has ended, was cancelled or has failed."""
        if self._running:
            self._running = False
            self._stream.budgets.give_back(self.budget)
            self._stream.steps.leave(self._number)
