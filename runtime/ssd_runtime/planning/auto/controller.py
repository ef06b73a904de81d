"""The controller of `auto` picks the option with the highest expected tokens/s before every cycle."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from ssd_profiles.latency import LatencyTable
from ssd_profiles.mask import SubLayerPlan
from ssd_runtime.drafting.lookup import Lookup, Ready
from ssd_runtime.planning.auto.draft_source import DraftProposal, DraftSource
from ssd_runtime.planning.auto.masked_drafts import MaskedDrafts
from ssd_runtime.planning.auto.shared_step import ChainYield, SequenceOptions
from ssd_runtime.planning.auto.stream import Stream
from ssd_runtime.planning.cost import CostModel
from ssd_runtime.planning.lookup import Guess, best_guess
from ssd_runtime.planning.plan import Cycle, Plan
from ssd_runtime.planning.settings import MOST_GUESSES
from ssd_runtime.sequence.load import Load

IDLE_CYCLES = 8
"""Planned cycles without a question to the sources, after none of them had a proposal."""
PLAIN_COSTS = [1.0]
"""Costs of a cycle that is not planned, which is a plain step."""
MIN_ADVANTAGE = 1.15
"""Expected speed-up of the model's drafts ÷ that of the guesses, below which guesses are verified.

The larger of two uncertain figures is too large on average, and a long draft takes tokens that guesses would have had
for less. In replays of a 1.5B model with masks 1.1 to 1.2 are 2 to 5% faster than 1."""
UNPLANNED = Plan("plain: not planned, since planning has used its share of the time")
UNKNOWN_LOAD = Plan("plain: others decode, and what a step takes with them is not known yet")
UNSETTLED = Plan("plain: what a step takes here is not known yet")
NOT_WORTH_IT = Plan("plain: no draft that the budget covers is expected to be faster")


class Controller:
    """The choices of one request: guesses by lookup, drafts by the model, or a plain step.

    Guesses cost no draft step, so their number follows from their probabilities and the verification curve alone. If
    several sequences share their steps, those of the stream decide together who drafts by masks (`shared_step`), and
    early exits are omitted. The request's budget must cover the failure of whatever is chosen. It also bounds the time
    of planning: if planning gains nothing on a fast device, only some steps are planned.
    """

    def __init__(
        self,
        latency: LatencyTable,
        stream: Stream,
        lookup: Lookup,
        sources: Sequence[DraftSource] = (),
        common: Sequence[MaskedDrafts] = (),
    ) -> None:
        """`lookup` has read the prompt, and `sources` may add its guesses after their drafts.

        `common` are the masks for joint drafts with other requests, the preferred ones first.
        """
        self._stream = stream
        self._lookup = lookup
        self._sources = sources
        self._common = common
        self._cost_model = CostModel(latency, stream.verify)
        self.budget = stream.budgets.take()
        self._number = stream.steps.join()
        self._running = True
        self._chosen: DraftProposal | None = None
        self._costs = PLAIN_COSTS
        """Costs of 1, 2, … rows of this request, when the latest plan was made."""
        self._after: int | None = None
        """Number of the shared step that the latest plan follows; None if this request is alone."""
        self._idle = 0
        """Plans to come that ask no source for a proposal."""
        self.planned = False
        """Whether the latest plan was chosen, and is not a plain step without a choice."""

    def plan(self, context: int, pending: int, load: Load | None = None) -> Plan:
        """Plan the next cycle after `context` committed tokens and the pending one; `load` is the latest forward's."""
        stream = self._stream
        first = self._lookup.known == context
        self._lookup.observe_first(context, pending)
        shared = load if load is not None and load.sequences > 1 else None
        self._after = shared.step if shared is not None else None
        self._chosen = None
        self._costs = PLAIN_COSTS
        self.planned = self.budget.covers_planning
        if not self.planned or not stream.verify.settled:
            self._update_member(Guess(()), most_cost=1.0)
            return UNSETTLED if self.planned else UNPLANNED
        self._costs = self._cost_model.rows(context) if shared is None else self._costs_under_load(shared)
        if load is None and first and len(stream.steps.members) > 1:
            return UNKNOWN_LOAD
        guess = best_guess(self._lookup, costs=self._costs, depth=MOST_GUESSES, most_cost=self.budget.most_cost)
        proposal = self._lone_proposal(context) if shared is None else self._joint_proposal(context, shared, guess)
        least = guess.speedup * (MIN_ADVANTAGE if guess.tree else 1.0)
        if proposal is not None and proposal.plan is not None and proposal.speedup >= least:
            self._chosen = proposal
            return proposal.plan
        if guess.tree:
            return Plan(reason="lookup", drafter=Ready(guess.tree), draft_length=MOST_GUESSES)
        return NOT_WORTH_IT

    def _costs_under_load(self, load: Load) -> list[float]:
        """Costs of 1, 2, … rows of a request that shares its steps, computed once per step for the whole stream."""
        stream = self._stream
        if stream.priced is None or stream.priced[0] is not load:
            others = max(round(load.rows * (1 - 1 / load.sequences)), load.sequences - 1)
            stream.priced = load, self._cost_model.rows_under_load(load.context, load.sequences, others)
        return stream.priced[1]

    def _lone_proposal(self, context: int) -> DraftProposal | None:
        """The best draft by the model for a request that is alone; None without any.

        After no source had a proposal, none is asked for `IDLE_CYCLES`: trust changes slowly, and asking takes a third
        of planning's time.
        """
        if self._idle:
            self._idle -= 1
            return None
        proposals = [
            proposal
            for source in self._sources
            if (proposal := source.propose(context, self._costs, self.budget.most_cost)) is not None
        ]
        self._idle = 0 if proposals else IDLE_CYCLES
        # The best counts even if the budget does not cover it yet: spent on the second best, it would never suffice.
        return max(proposals, key=lambda proposal: proposal.source.stats.discounted(proposal.best), default=None)

    def _joint_proposal(self, context: int, load: Load, guess: Guess) -> DraftProposal | None:
        """This request's part in the joint drafts of the stream's requests; None without a part."""
        steps = self._stream.steps
        most_cost = self.budget.most_cost
        if not steps.worth_deciding(load.step):
            self._update_member(guess, most_cost)
            return None
        found = [each for source in self._common if (each := source.yields(context, load.sequences)) is not None]
        masks = dict[SubLayerPlan, tuple[ChainYield, ...]]()
        for mask, chains in found:
            masks.setdefault(mask, chains)
        steps.members[self._number] = SequenceOptions(
            tokens=guess.tokens,
            rows=1 + len(guess.tree),
            most_cost=most_cost,
            masks=masks,
            asked=True,
        )
        steps.decide(load.step, costs=self._cost_model, context=load.context, sequences=load.sequences)
        share = steps.share(self._number)
        if share is None:
            return None
        proposals = (source.take_part(share, self._costs, most_cost) for source in self._common)
        return next((proposal for proposal in proposals if proposal is not None), None)

    def _update_member(self, guess: Guess, most_cost: float) -> None:
        """Update the guesses and the budget of this request for joint decisions; its masks stay as they are."""
        members = self._stream.steps.members
        known = members[self._number]
        rows = 1 + len(guess.tree)
        if (known.tokens, known.rows, known.most_cost) != (guess.tokens, rows, most_cost):
            members[self._number] = replace(known, tokens=guess.tokens, rows=rows, most_cost=most_cost)

    def plain_seconds(self, context: int) -> float | None:
        """Recent seconds of a lone request's plain step after `context` tokens; None before the first verification."""
        pace = self._stream.verify.pace
        return None if pace is None else pace * self._cost_model.plain_seconds(context)

    def observe(self, cycle: Cycle) -> None:
        """Update the stream's statistics and the budget with the planned cycle."""
        if self.planned:
            self._lookup.observe(cycle.tokens)
        else:
            self._lookup.append(cycle.tokens)
        tokens = len(cycle.tokens)
        # If there was no room to draft, the proposal was not used.
        chosen = self._chosen if cycle.steps or cycle.begun else None
        if chosen is None:
            cost = self._costs[min(cycle.verified, len(self._costs)) - 1]
        else:
            cost = chosen.source.observe(cycle, self._costs, self.plain_seconds(cycle.context))
        load = cycle.load or Load(rows=cycle.verified, context=cycle.context)
        sources = list[DraftSource](self._sources)
        if load.sequences > 1:
            sources += [source for source in self._common if source not in self._sources]
        for source in sources:
            if chosen is None or source is not chosen.source:
                source.stats.decay(tokens)
            else:
                source.stats.update_balance(tokens, cost)
        self._update_verify(cycle, load)
        planning = self._stream.planning.update(cycle.plan_seconds) if self.planned else 0.0
        # All sequences wait while one is planned.
        plainly = self._cost_model.shared_step(load.context, load.rows - cycle.verified + 1, load.sequences)
        step = (self.plain_seconds(load.context) or math.inf) * plainly / load.sequences
        self.budget.update(tokens, cost, planning / step)

    def _update_verify(self, cycle: Cycle, load: Load) -> None:
        """Update the times of verifications with a cycle's; requests that share a forward report it once."""
        stream = self._stream
        reported = stream.timed is load
        stream.timed = load
        # A verification that waited for drafts of others tells nothing about the time of its rows.
        if not (reported or cycle.begun or stream.steps.drafted_after(self._after)):
            steps = self._cost_model.shared_step(load.context, load.rows, load.sequences)
            expected = steps * self._cost_model.plain_seconds(load.context)
            stream.verify.update(load.rows, cycle.verify_seconds, expected)

    def finish(self) -> None:
        """Give the budget back: the request has ended, was cancelled or has failed."""
        if self._running:
            self._running = False
            self._stream.budgets.give_back(self.budget)
            self._stream.steps.leave(self._number)
