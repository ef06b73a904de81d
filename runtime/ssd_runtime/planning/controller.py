"""Chooses before every cycle what is expected to bring most tokens a second: the heart of `auto`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ssd_profiles.latency import LatencyTable
from ssd_runtime.drafting.extended import DEEPEST, Extended
from ssd_runtime.drafting.lookup import Lookup, LookupRecord, Ready
from ssd_runtime.drafting.masked import Masked
from ssd_runtime.planning.budget import Budget
from ssd_runtime.planning.frontier import Frontier
from ssd_runtime.planning.lookup import MOST_ROWS, best_guess, row_costs
from ssd_runtime.planning.plan import Cycle, Plan
from ssd_runtime.planning.throughput import Option

MIN_GAIN = 1.02
"""Expected speed-up below which masked drafts are not worth their risk."""
HYSTERESIS = 1.03
"""What masked drafts must promise beyond that to be taken up again."""
PRIOR_TOKENS = 16.0
"""Tokens that a mask's prediction counts for."""
KEEP = 0.95
"""What share of a mask's record one more cycle leaves."""
FORGET = 1 / 512
"""How much nearer to the prediction a record gets with every token that the mask is not used for: it is tried again."""
FORGIVEN = 0.01
"""A record this near to the prediction is as good as none."""
NO_MASKS = Frontier(())


@dataclass(slots=True)
class MaskRecord:
    """How masked drafts of one domain have fared against their prediction."""

    got: float = PRIOR_TOKENS
    predicted: float = PRIOR_TOKENS
    pace: float = 1.0
    """Draft steps' time ÷ what the latency table says of it, verifications' taken for right."""
    trusted: bool = True
    """Whether it was last expected to gain."""

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
        self.trusted |= abs(self.factor - 1.0) < FORGIVEN and abs(self.pace - 1.0) < FORGIVEN


@dataclass(slots=True)
class VerifyRecord:
    """What verifications of several rows take against plain steps just before or after, beyond the latency table.

    The table times chains and the arg max of all rows; trees, sampling and planning are seen here.
    """

    pace: float = 1.0
    _before: tuple[bool, float] | None = None

    def see(self, several: bool, seconds: float) -> None:
        """One more verification: whether of several rows, and its time ÷ what the table says."""
        if self._before is not None and self._before[0] != several and min(seconds, self._before[1]) > 0.0:
            ratio = seconds / self._before[1] if several else self._before[1] / seconds
            self.pace += 0.05 * (min(max(ratio, 0.67), 1.5) - self.pace)
        self._before = several, seconds

    def priced(self, costs: Sequence[float]) -> list[float]:
        """The table's costs of 1, 2, … rows, corrected."""
        return [costs[0], *(max(costs[0], cost * self.pace) for cost in costs[1:])]


@dataclass(slots=True)
class Stream:
    """What `auto` has learned from one stream of requests; it outlives a request: this planner's declared state."""

    lookup: LookupRecord = field(default_factory=LookupRecord)
    budget: Budget = field(default_factory=Budget)
    verify: VerifyRecord = field(default_factory=VerifyRecord)
    masks: dict[str, MaskRecord] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Draft:
    """Masked drafts that could be made now."""

    option: Option
    length: int
    tokens: float
    """Predicted of the cycle."""
    cost: float
    """If all are made and rejected, in plain steps."""
    speedup: float


class Controller:
    """One request's choices.

    Guesses that cost no draft step come first, and as many as their probabilities and the verification curve make
    pay; masked drafts where those promise more; else a plain step. Nothing is chosen whose failure the stream's budget
    does not cover.
    """

    def __init__(
        self,
        latency: LatencyTable,
        stream: Stream,
        prompt: Sequence[int],
        domain: str = "",
        frontier: Frontier = NO_MASKS,
    ) -> None:
        self._stream, self._correction = stream, frontier.correction
        self._record = stream.masks.setdefault(domain, MaskRecord())
        self._lookup, self._table = Lookup(stream.lookup), row_costs(latency)
        self._lookup.open(prompt)
        self._best = frontier.best(latency)
        self._drafting: _Draft | None = None
        self._costs: list[float] = []

    def plan(self, context: int, pending: int) -> Plan:
        """What to do behind `context` committed tokens and the pending one."""
        costs = self._costs = self._stream.verify.priced(self._table.at(context))
        guess = best_guess(self._lookup, context, pending, costs, MOST_ROWS, self._stream.budget.most_cost)
        self._drafting = self._masked(context, costs)
        drafting = self._drafting
        if drafting is not None and drafting.speedup >= guess.speedup:
            return self._draft(drafting, costs)
        self._drafting = None
        if guess.tree:
            detail = f"{len(guess.tree)} guesses, {guess.speedup:.2f}x"
            return Plan("lookup", Ready(guess.tree), MOST_ROWS, detail=detail)
        return Plan("plain: nothing that may fail is expected to be faster")

    def observe(self, cycle: Cycle) -> None:
        """Take in what came of the plan."""
        self._lookup.learn(cycle.tokens)
        tokens, row = len(cycle.tokens), min(cycle.verified, len(self._costs)) - 1
        cost = self._costs[row]
        spent = cycle.verify_seconds + cycle.plan_seconds
        self._stream.verify.see(row > 0, spent / self._table.at(cycle.context)[row])
        drafting = self._drafting
        if drafting is not None and cycle.steps:
            option, steps = drafting.option, cycle.steps * drafting.option.draft_cost
            pace = cycle.draft_seconds / cycle.verify_seconds / (steps / cost) if cycle.verify_seconds else 1.0
            cost += steps * self._record.pace
            # What the end of the answer has cut says nothing of the mask; guesses behind a chain are none of its doing.
            if len(cycle.tokens) > cycle.accepted and (option.threshold > 0.0 or cycle.steps == drafting.length):
                self._record.see(min(tokens, cycle.steps + 1), drafting.tokens, pace)
        else:
            self._record.rest(tokens)
        self._stream.budget.settle(tokens, cost)

    def _masked(self, context: int, costs: Sequence[float]) -> _Draft | None:
        """The best masked drafts by latency, validation and what they have shown, as long as the budget covers."""
        option = self._best.at(context)
        if option is None:
            return None
        record, profile, best = self._record, option.entry.profile, None
        step, column = option.draft_cost * record.pace, profile.thresholds.index(option.threshold)
        for row, length in enumerate(profile.draft_lengths):
            cost = length * step + costs[min(length, len(costs) - 1)]
            if length > option.draft_length or not self._stream.budget.allows(cost):
                break
            tokens, steps = float(profile.tokens[row, column]), float(profile.steps[row, column])
            speedup = tokens / (steps * step + costs[min(round(steps), len(costs) - 1)])
            if best is None or speedup > best.speedup:
                best = _Draft(option, length, tokens, cost, speedup)
        if best is None:
            return None
        best = replace(best, speedup=best.speedup * self._correction * record.factor)
        record.trusted = best.speedup >= MIN_GAIN * (1.0 if record.trusted else HYSTERESIS)
        return best if record.trusted else None

    def _draft(self, drafting: _Draft, costs: Sequence[float]) -> Plan:
        option = drafting.option
        agreement = option.entry.profile.token_agreement
        masked, left = Masked(option.entry.mask, option.threshold), self._stream.budget.most_cost - drafting.cost
        return Plan(
            f"draft {option.draft_length} with {option.entry.name}",
            Extended(masked, drafting.length, self._lookup, agreement, drafting.speedup, tuple(costs), left),
            drafting.length + DEEPEST,
            option.entry.name,
            option.entry.mask,
            detail=f"{drafting.length} tokens, {drafting.speedup:.2f}x",
        )
