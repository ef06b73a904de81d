"""The interface between planners and the decode loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ssd_profiles.mask import SkipMask
from ssd_runtime.drafting.masked import CHAIN, Branching, Masked
from ssd_runtime.drafting.successors import Successors
from ssd_runtime.drafting.tree import Drafter
from ssd_runtime.engine.session import Load, Prefill, Session
from ssd_runtime.model.runner import Work


@dataclass(frozen=True, slots=True)
class Plan:
    """The next cycle: draft up to `draft_length` tokens with `drafter`, or a plain step without one."""

    reason: str
    """One phrase for `--explain`."""
    drafter: Drafter | None = None
    draft_length: int = 0
    entry: str | None = None
    """Which frontier entry the mask is, as `domain[index]`."""
    mask: SkipMask | None = None
    """What drafting skips; None where it does not go by a mask."""
    detail: str = ""
    """What differs from step to step, for `--explain-steps`."""

    @classmethod
    def masked(
        cls,
        reason: str,
        mask: SkipMask,
        draft_length: int,
        threshold: float = 0.0,
        entry: str | None = None,
        branching: Branching = CHAIN,
    ) -> Plan:
        """Draft without the sub-layers of `mask`."""
        return cls(reason, Masked(mask, threshold, branching), draft_length, entry, mask)


PLAIN = Plan("plain decoding")


@dataclass(frozen=True, slots=True)
class Cycle:
    """One draft-verify cycle, or one plain step, as it happened."""

    plan: Plan
    """Without its drafter, which may hold much."""
    context: int
    """Tokens in the cache when it began."""
    drafted: int
    """Length of the draft's main path: siblings are not counted."""
    accepted: int
    """Drafted tokens of the chain that stood."""
    tokens: list[int]
    """What it yielded: the tokens that stood and the one behind them, cut at the end of generation."""
    verified: int
    """Rows of the verification: the pending token, the drafted ones and their siblings."""
    draft_seconds: float
    verify_seconds: float
    steps: int = 0
    """Draft steps that the model made."""
    plan_seconds: float = 0.0
    """Deciding on the plan, searches and the update after the last cycle included.

    All seconds that pass meanwhile count, as in drafting: those of forwards that a search shares with other sequences,
    and those of forwards that it waits for.
    """
    load: Load | None = None
    """What shared the verification; None where the sequence was alone."""
    begun: bool = False
    """Whether verification went on from layers that drafting had been through."""

    @property
    def is_cut(self) -> bool:
        """Whether the answer ended within what was accepted: what lies behind its end says nothing of the drafts."""
        return len(self.tokens) <= self.accepted

    @property
    def num_draft_tokens(self) -> int:
        """Tokens drafted, but for those behind the answer's end."""
        return len(self.tokens) if self.is_cut else self.drafted

    @property
    def num_accepted_tokens(self) -> int:
        """Drafted tokens that stood and are part of the answer."""
        return len(self.tokens) if self.is_cut else self.accepted

    @property
    def seconds(self) -> float:
        """Drafting and verification together."""
        return self.draft_seconds + self.verify_seconds


class Planner(Protocol):
    """Decides cycle by cycle; one object serves one request.

    Every cycle asks `searching`, then `plan`, then `wants_states`, and hands what happened to `observe`.
    """

    domain: str | None
    """Where the prompt was routed, if it was."""
    successors: Successors | None
    """What takes in the target's candidates behind every verified row, if anything does."""

    @property
    def wants_states(self) -> bool:
        """Whether `observe` needs the hidden states of the next verification."""
        ...

    def start(self, session: Session, prompt: Prefill) -> None:
        """Called once, behind the prefill."""
        ...

    def searching(self, context: int) -> Work[None]:
        """Run what the next plan depends on, with `context` tokens in the cache: searches that are due.

        The one place where a planner asks for forwards; nothing is run where nothing is due.
        """
        ...

    def plan(self, context: int, pending: int) -> Plan:
        """What to do next with `context` tokens in the cache, behind the token `pending`."""
        ...

    def observe(self, cycle: Cycle, states: list[Tensor] | None) -> None:
        """What came of it; `states` are 2L + 1 tensors [committed tokens, hidden] when they were wanted."""
        ...

    def finish(self) -> None:
        """Called once, when the request has ended, was cancelled or has failed."""
        ...


class BasePlanner:
    """A planner that searches for nothing, needs no states and learns nothing."""

    domain: str | None = None
    successors: Successors | None = None

    @property
    def wants_states(self) -> bool:
        """No."""
        return False

    def start(self, session: Session, prompt: Prefill) -> None:
        """Nothing to prepare."""

    def searching(self, context: int) -> Work[None]:
        """Nothing to run."""
        yield from ()

    def observe(self, cycle: Cycle, states: list[Tensor] | None) -> None:
        """Nothing to learn."""

    def finish(self) -> None:
        """Nothing to give back."""


class PlainPlanner(BasePlanner):
    """Plain decoding, always."""

    def plan(self, context: int, pending: int) -> Plan:
        """A plain step."""
        return PLAIN


class ConstantPlanner(BasePlanner):
    """One plan for every cycle."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def plan(self, context: int, pending: int) -> Plan:
        """The plan."""
        return self._plan
