"""The interface between planners and the decode loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ssd_profiles.mask import SubLayerPlan
from ssd_runtime.drafting.chain import CHAIN, Branching
from ssd_runtime.drafting.masked import Masked
from ssd_runtime.drafting.successors import Successors
from ssd_runtime.drafting.tree import Drafter, Origin
from ssd_runtime.model.runner import Work
from ssd_runtime.sequence.load import Load
from ssd_runtime.sequence.prefill import Prefill
from ssd_runtime.sequence.session import Session


@dataclass(frozen=True, slots=True)
class Plan:
    """The next cycle: a draft of up to `draft_length` tokens by `drafter`, or a plain step without one."""

    reason: str
    """One phrase for `--explain`."""
    drafter: Drafter | None = None
    draft_length: int = 0
    entry: str | None = None
    """The mask's entry of a frontier, as `domain[index]`."""
    mask: SubLayerPlan | None = None
    """Sub-layers that drafting skips; None if the drafter uses no mask."""

    @classmethod
    def masked(
        cls,
        reason: str,
        mask: SubLayerPlan,
        draft_length: int,
        threshold: float = 0.0,
        entry: str | None = None,
        branching: Branching = CHAIN,
    ) -> Plan:
        """A plan that drafts without the sub-layers of `mask`."""
        return cls(
            reason=reason,
            drafter=Masked(mask, threshold, branching),
            draft_length=draft_length,
            entry=entry,
            mask=mask,
        )


PLAIN = Plan("plain decoding")


@dataclass(frozen=True, slots=True)
class Cycle:
    """One draft-verify cycle, or one plain step, as it happened."""

    plan: Plan
    """The plan without its drafter, which may hold large objects."""
    context: int
    """Committed tokens when the cycle began."""
    drafted: int
    """Length of the draft's main path; siblings are not counted."""
    accepted: int
    """Accepted tokens of the main path."""
    tokens: list[int]
    """New tokens: the accepted ones and the target's own after them, cut at the end of generation."""
    verified: int
    """Rows of the verification: the pending token, the drafted ones and their siblings."""
    draft_seconds: float
    verify_seconds: float
    steps: int = 0
    """Draft steps of the model."""
    plan_seconds: float = 0.0
    """Seconds of planning, of searches and of the update after the last cycle.

    All time that passes counts, as it does in drafting: forwards that a search shares with other sequences, and
    forwards that it waits for.
    """
    load: Load | None = None
    """The load of the verification; None if the sequence was alone."""
    held: bool = False
    """Whether steps of other sequences ran while this one drafted."""
    begun: bool = False
    """Whether verification went on from the layers that drafting had run."""
    origins: Sequence[Origin] = ()
    """The origin of each of `tokens`."""

    @property
    def is_cut(self) -> bool:
        """Whether the answer ended within the accepted tokens; such a cycle tells nothing of the drafts after that."""
        return len(self.tokens) <= self.accepted

    @property
    def num_draft_tokens(self) -> int:
        """Tokens drafted, except those after the answer's end."""
        return len(self.tokens) if self.is_cut else self.drafted

    @property
    def num_accepted_tokens(self) -> int:
        """Accepted tokens that are part of the answer."""
        return len(self.tokens) if self.is_cut else self.accepted

    @property
    def seconds(self) -> float:
        """Seconds of drafting and verification together."""
        return self.draft_seconds + self.verify_seconds


class Planner:
    """Decides cycle by cycle; one object serves one request. This base runs no searches and learns nothing.

    Every cycle calls `searching`, `plan` and `wants_states` in this order, and `observe` at its end.
    """

    domain: str | None = None
    """The domain that the prompt was routed to; None if it was not routed."""
    successors: Successors | None = None
    """The table to update with the target's candidates after every accepted row; None for no table."""

    @property
    def wants_states(self) -> bool:
        """Whether `observe` needs the hidden states of the next verification."""
        return False

    def start(self, session: Session, prompt: Prefill) -> None:
        """Prepare for the request; called once, after the prefill."""

    def searching(self, context: int) -> Work[None]:
        """Run the searches that are due before the next plan, with `context` committed tokens.

        This is the one place where a planner asks for forwards.
        """
        yield from ()

    def plan(self, context: int) -> Plan:
        """The plan of the next cycle, with `context` committed tokens and the session's pending one after them."""
        raise NotImplementedError

    def observe(self, cycle: Cycle, states: list[Tensor] | None) -> None:
        """Learn from a cycle; `states` are 2L + 1 tensors [committed rows, hidden] if they were wanted."""

    def finish(self) -> None:
        """Release the request's resources; called once, when it has ended, was cancelled or has failed."""


class ConstantPlanner(Planner):
    """Plans the same in every cycle."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def plan(self, context: int) -> Plan:
        """Return the one plan."""
        return self._plan


class PlainPlanner(ConstantPlanner):
    """Plans a plain step in every cycle; fills `successors`, if given, with what the model ranks high."""

    def __init__(self, successors: Successors | None = None) -> None:
        super().__init__(PLAIN)
        self.successors = successors
