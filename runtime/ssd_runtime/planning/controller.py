"""Chooses before every cycle what is expected to bring most tokens a second: the heart of `auto`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ssd_profiles.latency import LatencyTable
from ssd_runtime.drafting.lookup import Lookup, LookupRecord, Ready
from ssd_runtime.planning.budget import Budget
from ssd_runtime.planning.frontier import BestOption, Frontier
from ssd_runtime.planning.lookup import MOST_ROWS, RowCosts, worth_verifying
from ssd_runtime.planning.plan import Cycle, Plan
from ssd_runtime.planning.throughput import Option

MIN_GAIN = 1.02
"""Expected speed-up below which masked drafts are not worth their risk."""
HYSTERESIS = 1.03
"""What masked drafts must promise beyond the alternative to be taken up; to be kept on they need no more than it."""
PRIOR_CYCLES = 4.0
"""Cycles that a mask's predicted tokens count for."""
KEEP = 0.95
"""What share of a mask's record one more cycle leaves."""
FORGET = 1 / 512
"""How much nearer to the prediction a record gets with every token that the mask is not used for: it is tried again."""
MOST_DEPTH = 24
NO_MASKS = Frontier(())


@dataclass(slots=True)
class MaskRecord:
    """How masked drafts of one domain have fared against their prediction."""

    got: float = PRIOR_CYCLES
    predicted: float = PRIOR_CYCLES
    pace: float = 1.0
    """Draft steps' time ÷ what the latency table says of it, verifications' taken for right."""
    using: bool = False

    @property
    def factor(self) -> float:
        """Tokens a cycle ÷ those predicted."""
        return self.got / self.predicted

    def see(self, tokens: int, predicted: float, pace: float) -> None:
        """One more cycle."""
        self.got, self.predicted = KEEP * self.got + tokens, KEEP * self.predicted + predicted
        self.pace += 0.1 * (min(max(pace, 0.5), 2.0) - self.pace)

    def rest(self, tokens: int) -> None:
        """So many tokens came without it."""
        share = min(1.0, tokens * FORGET)
        self.got += share * (self.predicted - self.got)
        self.pace += share * (1.0 - self.pace)


@dataclass(slots=True)
class Stream:
    """What `auto` has learned from one stream of requests; it outlives a request: this planner's declared state."""

    lookup: LookupRecord = field(default_factory=LookupRecord)
    budget: Budget = field(default_factory=Budget)
    masks: dict[str, MaskRecord] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Draft:
    """Masked drafts that could be made now."""

    option: Option
    length: int
    speedup: float


class Controller:
    """One request's choices.

    Guesses that cost no draft step come first, and as many as their probabilities and the verification curve make
    pay; masked drafts where those promise more; else a plain step. Nothing is chosen whose failure the stream's budget
    does not cover.
    """

    def __init__(self, latency: LatencyTable, stream: Stream, domain: str = "", frontier: Frontier = NO_MASKS) -> None:
        self._stream, self._correction = stream, frontier.correction
        self._record = stream.masks.setdefault(domain, MaskRecord())
        self._lookup, self._costs = Lookup(stream.lookup), RowCosts(latency)
        self._best = BestOption(frontier.entries, latency)
        self._drafting: _Draft | None = None

    def plan(self, ids: Sequence[int]) -> Plan:
        """What to do behind the tokens `ids`, the pending one last."""
        context, budget = len(ids) - 1, self._stream.budget
        self._lookup.read(ids)
        costs = self._costs.at(context)
        guess = worth_verifying(self._lookup.grow((), MOST_ROWS, MOST_DEPTH), costs, 1.0 + budget.credit)
        self._drafting = self._masked(context, costs)
        needed = max(MIN_GAIN, guess.speedup) * (1.0 if self._record.using else HYSTERESIS)
        if self._drafting is not None and self._drafting.speedup >= needed:
            self._record.using = True
            return self._draft(self._drafting)
        self._record.using, self._drafting = False, None
        if guess.tree:
            return Plan(
                "lookup", Ready(guess.tree), MOST_DEPTH, detail=f"{len(guess.tree)} guesses, {guess.speedup:.2f}x"
            )
        return Plan("plain: nothing is expected to be faster")

    def observe(self, cycle: Cycle, ids: Sequence[int]) -> None:
        """Take in what came of the plan, and the tokens that there are now."""
        self._lookup.read(ids)
        costs, tokens = self._costs.at(cycle.context), len(cycle.tokens)
        cost = costs[min(cycle.verified, len(costs)) - 1]
        drafting = self._drafting
        if drafting is not None and cycle.drafted:
            steps = cycle.drafted * drafting.option.draft_cost
            pace = cycle.draft_seconds / cycle.verify_seconds / (steps / cost) if cycle.verify_seconds else 1.0
            cost += steps * self._record.pace
            share = min(1.0, drafting.length / drafting.option.draft_length)
            self._record.see(tokens, 1.0 + share * (drafting.option.tokens - 1.0), pace)
        else:
            self._record.rest(tokens)
        self._stream.budget.settle(tokens, cost)

    def _masked(self, context: int, costs: Sequence[float]) -> _Draft | None:
        """The best masked drafts by latency, validation and what they have shown, as long as the budget covers."""
        option = self._best.at(context)
        if option is None:
            return None
        step, budget = option.draft_cost * self._record.pace, self._stream.budget
        length = option.draft_length
        while length and not budget.allows(length * step + costs[min(length, len(costs) - 1)]):
            length -= 1
        if not length:
            return None
        # The cycle takes tokens ÷ speedup plain steps, of which its draft steps are off by the pace.
        slower = 1.0 + (self._record.pace - 1.0) * option.steps * option.draft_cost * option.speedup / option.tokens
        return _Draft(option, length, option.speedup * self._correction * self._record.factor / slower)

    def _draft(self, drafting: _Draft) -> Plan:
        option = drafting.option
        return Plan.masked(
            f"draft {option.draft_length} with {option.entry.name}",
            option.entry.mask,
            drafting.length,
            option.threshold,
            option.entry.name,
            detail=f"{drafting.length} tokens, {drafting.speedup:.2f}x",
        )
