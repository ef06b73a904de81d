"""Decides, once for a step that several sequences share, who drafts in it by masked steps, and with which mask."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ssd_profiles.mask import SkipMask
from ssd_runtime.planning.auto.draft_stats import MIN_GAIN
from ssd_runtime.planning.cost import CostModel

IDLE_STEPS = 8
"""Steps from one decision that nobody drafts by masks to the next."""


class ChainYield(NamedTuple):
    """What a chain of up to `length` masked tokens yields on average."""

    length: int
    steps: float
    """Draft steps per cycle."""
    tokens: float
    """Tokens per cycle, the target's own included."""


@dataclass(frozen=True, slots=True)
class Member:
    """What one running sequence could do in the next step."""

    tokens: float = 1.0
    """Expected without masked drafts: of its guesses and the target's own token."""
    rows: int = 1
    """Rows of the verification of these."""
    most_cost: float = 1.0
    """Plain steps that its budget lets a cycle cost."""
    masks: Mapping[SkipMask, tuple[ChainYield, ...]] = field(default_factory=dict)
    """The masks that it could draft with, and what chains of every length would yield."""
    asked: bool = False
    """Whether it has said so."""


@dataclass(frozen=True, slots=True)
class Share:
    """A sequence's part in a step: a chain by masked steps that it makes together with others."""

    mask: SkipMask
    length: int
    step_cost: float
    """Plain steps that it is charged for a draft step: all sequences wait for it, and those that draft pay for all."""


@dataclass(frozen=True, slots=True)
class _Group:
    """Sequences that draft with one mask, as long each."""

    mask: SkipMask
    length: int
    members: tuple[int, ...]
    draft_step: float
    """One draft step of them all, in plain steps of a sequence that is alone."""
    steps: float
    """Draft steps that the group makes."""
    tokens: float
    """Of all its members, beyond what these would yield without."""
    rows: float
    """The same of rows."""


@dataclass(frozen=True, slots=True)
class _Step:
    """A shared step as far as it is decided."""

    tokens: float
    rows: float
    drafting: float = 0.0
    """All draft steps, in plain steps of a sequence that is alone."""

    def plus(self, group: _Group) -> _Step:
        """The step in which the group drafts, too."""
        drafting = self.drafting + group.steps * group.draft_step
        return _Step(self.tokens + group.tokens, self.rows + group.rows, drafting)

    def rate(self, costs: CostModel, context: int, sequences: int) -> float:
        """Tokens of all sequences in the time of a plain step of one that is alone."""
        return self.tokens / (self.drafting + costs.shared_step(context, round(self.rows), sequences))


def shares(members: Mapping[int, Member], costs: CostModel, context: int, sequences: int) -> dict[int, Share]:
    """The parts of those who draft, by their numbers: what is expected to bring most tokens a second of all together.

    `members` are some of the `sequences` that share the step; the others add a row and a token each. Groups of one mask
    and length are added one by one, the best first, as long as the whole step gains: so a common mask, masks of their
    own and no drafts at all are weighed by one figure. Early exits take no part: their rows leave at different depths.
    """
    strangers = max(0, sequences - len(members))
    step = _Step(
        tokens=strangers + sum(member.tokens for member in members.values()),
        rows=strangers + sum(member.rows for member in members.values()),
    )
    found, rate = dict[int, Share](), MIN_GAIN * step.rate(costs, context, sequences)
    plain = costs.shared_step(context, sequences, sequences)
    while groups := _groups(members, found, costs, context, sequences):
        rates = [step.plus(group).rate(costs, context, sequences) for group in groups]
        if max(rates) <= rate:
            break
        rate, best = max(rates), groups[rates.index(max(rates))]
        step = step.plus(best)
        charged = _step_cost(best.draft_step, plain, len(best.members), sequences)
        found |= dict.fromkeys(best.members, Share(best.mask, best.length, charged))
    return found


def _groups(
    members: Mapping[int, Member], placed: Mapping[int, Share], costs: CostModel, context: int, sequences: int
) -> list[_Group]:
    """Every mask that is not in use yet, at every length, with the members whose budgets cover it."""
    used = {share.mask for share in placed.values()}
    free = {number: member for number, member in members.items() if number not in placed}
    plain, groups = costs.shared_step(context, sequences, sequences), list[_Group]()
    for mask in dict.fromkeys(mask for member in free.values() for mask in member.masks if mask not in used):
        draft_steps = dict[int, float]()
        """By the number of those who draft."""
        for length, taking in _by_length(mask, free).items():
            added, count = costs.shared_step(context, sequences + length, sequences) / plain - 1.0, 0
            # Fewer share the draft steps where some budgets do not cover them.
            while count != len(taking) > 0:
                count = len(taking)
                if count not in draft_steps:
                    draft_steps[count] = costs.draft_step(context, mask, count)
                charged = _step_cost(draft_steps[count], plain, count, sequences)
                failing = 1.0 + sequences * added + length * charged
                taking = {number: chain for number, chain in taking.items() if members[number].most_cost >= failing}
            if taking:
                groups.append(_group(mask, length, taking, members, draft_steps[count]))
    return groups


def _by_length(mask: SkipMask, members: Mapping[int, Member]) -> dict[int, dict[int, ChainYield]]:
    """Length to member to what a chain by this mask yields."""
    found = dict[int, dict[int, ChainYield]]()
    for number, member in members.items():
        for chain in member.masks.get(mask, ()):
            found.setdefault(chain.length, {})[number] = chain
    return found


def _group(
    mask: SkipMask, length: int, chains: Mapping[int, ChainYield], members: Mapping[int, Member], draft_step: float
) -> _Group:
    return _Group(
        mask=mask,
        length=length,
        members=tuple(chains),
        draft_step=draft_step,
        # Of several chains the longest counts: one of them is hardly ever cut short by doubt.
        steps=float(length) if len(chains) > 1 else next(iter(chains.values())).steps,
        tokens=sum(chain.tokens - members[number].tokens for number, chain in chains.items()),
        rows=sum(1.0 + chain.steps - members[number].rows for number, chain in chains.items()),
    )


def _step_cost(draft_step: float, plain: float, drafting: int, sequences: int) -> float:
    """What one of those who draft is charged for a step, in plain steps of all `sequences` together."""
    return sequences / drafting * draft_step / plain


@dataclass(slots=True)
class SharedSteps:
    """The running sequences of a stream, and the latest decision of theirs."""

    members: dict[int, Member] = field(default_factory=dict)
    _numbers: int = 0
    _step: int | None = None
    """What the latest decision follows."""
    _shares: dict[int, Share] = field(default_factory=dict)
    _drafted: tuple[int, ...] = ()
    """The latest steps, two at most, that masked drafts follow: some still verify these when others plan again."""

    def join(self) -> int:
        """A number for a sequence that begins; it can do nothing yet but decode plainly."""
        self._numbers += 1
        self.members[self._numbers] = Member()
        return self._numbers

    def leave(self, number: int) -> None:
        """Forget a sequence that has ended."""
        self.members.pop(number, None)
        self._shares.pop(number, None)

    def decide(self, step: int, costs: CostModel, context: int, sequences: int) -> None:
        """Decide on what comes after the step of that number; who comes first decides for all."""
        if step == self._step:
            return
        self._step, self._shares = step, shares(self.members, costs, context, sequences)
        if self._shares:
            self._drafted = (*self._drafted[-1:], step)

    def worth_deciding(self, step: int) -> bool:
        """Whether to weigh masked drafts after the step of that number.

        Where all could draft and nobody did, `IDLE_STEPS` go by before the next decision: it takes everybody's time.
        """
        if self._step is None or self._shares or not all(member.asked for member in self.members.values()):
            return True
        return not 0 < step - self._step < IDLE_STEPS

    def share(self, number: int) -> Share | None:
        """A sequence's part in the latest decision; None where it drafts by itself or not at all."""
        return self._shares.get(number)

    def drafted_after(self, step: int | None) -> bool:
        """Whether anybody drafted by masked steps after the step of that number, one of the latest two."""
        return step is not None and step in self._drafted
