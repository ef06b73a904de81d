"""Decides, once per shared step, which sequences draft in it by masked steps, and with which masks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ssd_profiles.mask import SubLayerPlan
from ssd_runtime.planning.auto.draft_stats import MIN_GAIN
from ssd_runtime.planning.cost import CostModel

IDLE_STEPS = 8
"""Steps between two decisions if the first lets no sequence draft by masks."""


class ChainYield(NamedTuple):
    """The average yield of a chain of up to `length` masked tokens."""

    length: int
    steps: float
    """Draft steps per cycle."""
    tokens: float
    """Tokens per cycle, the target's own included."""


@dataclass(frozen=True, slots=True)
class SequenceOptions:
    """The options of one running sequence in the next step."""

    tokens: float = 1.0
    """Expected tokens without masked drafts: those of its guesses and the target's own."""
    rows: int = 1
    """Rows of the verification without masked drafts."""
    most_cost: float = 1.0
    """Largest cost of a cycle that its budget covers, in plain steps."""
    masks: Mapping[SubLayerPlan, tuple[ChainYield, ...]] = field(default_factory=dict)
    """The masks that it could draft with, and the yields of chains of every length."""
    asked: bool = False
    """Whether it has named its masks."""


@dataclass(frozen=True, slots=True)
class Share:
    """A sequence's part in a step: a chain by masked steps, drafted together with others."""

    mask: SubLayerPlan
    length: int
    step_cost: float
    """Plain steps charged for a draft step. All sequences wait for it, and those that draft pay for all."""


@dataclass(frozen=True, slots=True)
class _Group:
    """Sequences that draft chains of one length with one mask."""

    mask: SubLayerPlan
    length: int
    members: tuple[int, ...]
    """Numbers of the sequences."""
    draft_step: float
    """Cost of a draft step of all members, in plain steps of a lone sequence."""
    steps: float
    """Draft steps of the group."""
    tokens: float
    """Tokens of all members, beyond those without masked drafts."""
    rows: float
    """Rows of all members, beyond those without masked drafts."""


@dataclass(frozen=True, slots=True)
class _Step:
    """A shared step as decided so far."""

    tokens: float
    rows: float
    drafting: float = 0.0
    """Cost of all draft steps, in plain steps of a lone sequence."""

    def plus(self, group: _Group) -> _Step:
        """The step with the group's drafts added."""
        drafting = self.drafting + group.steps * group.draft_step
        return _Step(self.tokens + group.tokens, self.rows + group.rows, drafting)

    def rate(self, costs: CostModel, context: int, sequences: int) -> float:
        """Tokens of all sequences per plain step's time of a lone sequence."""
        return self.tokens / (self.drafting + costs.shared_step(context, round(self.rows), sequences))


def shares(members: Mapping[int, SequenceOptions], costs: CostModel, context: int, sequences: int) -> dict[int, Share]:
    """The parts of the sequences that draft, by their numbers, with the highest expected tokens/s of all together.

    `members` are some of the `sequences` that share the step; each of the others adds a row and a token. Groups of one
    mask and length are added one by one, the best first, while the whole step gains. So a common mask, separate masks
    and no drafts at all are compared by one figure. Early exits take no part, since their rows exit at various depths.
    """
    others = max(0, sequences - len(members))
    step = _Step(
        tokens=others + sum(member.tokens for member in members.values()),
        rows=others + sum(member.rows for member in members.values()),
    )
    found = dict[int, Share]()
    rate = MIN_GAIN * step.rate(costs, context, sequences)
    plain = costs.shared_step(context, sequences, sequences)
    while groups := _groups(members=members, placed=found, costs=costs, context=context, sequences=sequences):
        rates = [step.plus(group).rate(costs, context, sequences) for group in groups]
        if max(rates) <= rate:
            break
        rate = max(rates)
        best = groups[rates.index(rate)]
        step = step.plus(best)
        charged = _step_cost(best.draft_step, plain=plain, drafting=len(best.members), sequences=sequences)
        found |= dict.fromkeys(best.members, Share(best.mask, best.length, charged))
    return found


def _groups(
    members: Mapping[int, SequenceOptions], placed: Mapping[int, Share], costs: CostModel, context: int, sequences: int
) -> list[_Group]:
    """Every mask that is not in use yet, at every length, with the members whose budgets cover it."""
    used = {share.mask for share in placed.values()}
    free = {number: member for number, member in members.items() if number not in placed}
    plain = costs.shared_step(context, sequences, sequences)
    groups = list[_Group]()
    for mask in dict.fromkeys(mask for member in free.values() for mask in member.masks if mask not in used):
        draft_steps = dict[int, float]()
        """Cost of a draft step, by the number of sequences that draft."""
        for length, taking in _by_length(mask, free).items():
            added = costs.shared_step(context, sequences + length, sequences) / plain - 1.0
            count = 0
            # Members whose budgets do not cover the cost drop out, and the draft steps get dearer for the rest.
            while count != len(taking) > 0:
                count = len(taking)
                if count not in draft_steps:
                    draft_steps[count] = costs.draft_step(context, mask, count)
                charged = _step_cost(draft_steps[count], plain=plain, drafting=count, sequences=sequences)
                failing = 1.0 + sequences * added + length * charged
                taking = {number: chain for number, chain in taking.items() if members[number].most_cost >= failing}
            if taking:
                group = _Group(
                    mask=mask,
                    length=length,
                    members=tuple(taking),
                    draft_step=draft_steps[count],
                    # The longest of several chains counts: they are hardly ever all cut short by low confidence.
                    steps=float(length) if count > 1 else next(iter(taking.values())).steps,
                    tokens=sum(chain.tokens - members[number].tokens for number, chain in taking.items()),
                    rows=sum(1.0 + chain.steps - members[number].rows for number, chain in taking.items()),
                )
                groups.append(group)
    return groups


def _by_length(mask: SubLayerPlan, members: Mapping[int, SequenceOptions]) -> dict[int, dict[int, ChainYield]]:
    """Yields of chains by this mask, by length and then by member."""
    found = dict[int, dict[int, ChainYield]]()
    for number, member in members.items():
        for chain in member.masks.get(mask, ()):
            found.setdefault(chain.length, {})[number] = chain
    return found


def _step_cost(draft_step: float, plain: float, drafting: int, sequences: int) -> float:
    """Charge of a draft step for one of `drafting` sequences, in plain steps of all `sequences` together."""
    return sequences / drafting * draft_step / plain


@dataclass(slots=True)
class SharedSteps:
    """The running sequences of a stream, and their latest joint decision."""

    members: dict[int, SequenceOptions] = field(default_factory=dict)
    """Running sequences by number."""
    _numbers: int = 0
    """Numbers given so far."""
    _step: int | None = None
    """Number of the step that the latest decision follows."""
    _shares: dict[int, Share] = field(default_factory=dict)
    _drafted: tuple[int, ...] = ()
    """The latest steps, at most two, that masked drafts follow: some still verify these when others plan again."""

    def join(self) -> int:
        """Add a sequence, which decodes plainly at first; returns its number."""
        self._numbers += 1
        self.members[self._numbers] = SequenceOptions()
        return self._numbers

    def leave(self, number: int) -> None:
        """Remove a sequence that has ended."""
        self.members.pop(number, None)
        self._shares.pop(number, None)

    def decide(self, step: int, costs: CostModel, context: int, sequences: int) -> None:
        """Decide on the drafts after step number `step`; the first call for a step decides for all."""
        if step == self._step:
            return
        self._step = step
        self._shares = shares(self.members, costs=costs, context=context, sequences=sequences)
        if self._shares:
            self._drafted = (*self._drafted[-1:], step)

    def worth_deciding(self, step: int) -> bool:
        """Whether to compare masked drafts after step number `step`.

        If all sequences have named their masks and none drafted, the next decision comes `IDLE_STEPS` steps later,
        since all of them wait for it.
        """
        if self._step is None or self._shares or not all(member.asked for member in self.members.values()):
            return True
        return not 0 < step - self._step < IDLE_STEPS

    def share(self, number: int) -> Share | None:
        """A sequence's part in the latest decision; None if it does not draft together with others."""
        return self._shares.get(number)

    def drafted_after(self, step: int | None) -> bool:
        """Whether any sequence drafted by masked steps after step number `step`, one of the latest two."""
        return step is not None and step in self._drafted
