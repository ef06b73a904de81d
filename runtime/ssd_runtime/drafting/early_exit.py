"""Drafts by the model's first layers; verification goes on from their states (SpecBound §2.3)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ssd_profiles.formulas import annealed_temperature
from ssd_runtime.drafting.tree import Draft, PartialForward
from ssd_runtime.model.exit_heads import ExitHeads
from ssd_runtime.model.runner import Head, Work
from ssd_runtime.sampling.sampler import Proposal
from ssd_runtime.sequence.session import Session


@dataclass(frozen=True, slots=True)
class EarlyExit:
    """A drafter whose tokens exit after the first of `stops` layers that predicts the next token with confidence.

    The last stop is the depth bound. A token without a confident prediction there ends the draft: it joins the
    verification, which yields its successor. If the draft ends by its length or its tokens instead, its last token
    joins the verification too, for the bonus token. It is brought to the deepest token's depth first, together with
    those that exited earlier.
    """

    heads: ExitHeads
    stops: tuple[int, ...]
    """Layers after which a token may exit, ascending."""
    threshold: float
    """Least (annealed) confidence of an exit."""
    annealing: float = 0.0
    """Growth of the temperature toward the first layers; 0 leaves it at 1."""
    goes_on: Callable[[Sequence[int]], bool] | None = None
    """Whether a draft of these tokens goes on; None for always."""

    def drafting(self, session: Session, length: int) -> Work[Draft]:
        """Draft up to `length` tokens after the pending one."""
        rows = _Rows(session)
        path = [session.pending]
        probs = list[Tensor]()
        rows.add(session.pending)
        while (proposal := (yield from self._leaving(rows, path))) is not None:
            path.append(proposal.token)
            if proposal.probs is not None:
                probs.append(proposal.probs)
            rows.add(proposal.token)
            is_last = len(path) == length + 1 or proposal.token in session.ends
            if is_last or (self.goes_on is not None and not self.goes_on(path[1:])):
                yield from rows.advancing(rows.deepest)
                break
        begun = PartialForward(2 * rows.deepest, torch.cat(rows.states))
        return Draft(path[1:], begun=begun, probs=probs, steps=len(path) - 1)

    def _leaving(self, rows: _Rows, path: list[int]) -> Work[Proposal | None]:
        """Propose the token after the last row from the first confident stop.

        None if no stop is confident, or if the answer ends there: the verification yields that token too. One that was
        drawn is proposed all the same: drawn once more, it would be rarer than it should be.
        """
        layers = rows.session.decoder.shape.num_layers
        for stop in self.stops:
            yield from rows.advancing(stop)
            # The confidence takes time, so it is computed only if it is used.
            temperature = annealed_temperature(stop, layers, self.annealing) if self.threshold > 0.0 else None
            [logits] = yield Head(self.heads.carried(stop, rows.states[-1]), normed=True, drafting=True)
            proposal = rows.session.propose(logits, lambda: path, temperature)
            ends = proposal.probs is None and proposal.token in rows.session.ends
            if math.exp(-proposal.nll) >= self.threshold and not ends:
                return proposal
        return None


@dataclass(slots=True)
class _Rows:
    """The hidden-state cache: each token's depth in layers, and its state at that depth.

    A token needs the keys of all tokens before it in every layer that it runs through. Where it goes deeper than these
    went, they are caught up from where they exited. So depths never rise from one row to the next.
    """

    session: Session
    states: list[Tensor] = field(default_factory=list)
    """Each [1, hidden]."""
    depths: list[int] = field(default_factory=list)

    @property
    def deepest(self) -> int:
        """Layers that the first token has run through."""
        return self.depths[0]

    def add(self, token: int) -> None:
        """Append a token at depth 0, with its embedding."""
        self.states.append(self.session.decoder.embed([token]))
        self.depths.append(0)

    def advancing(self, depth: int) -> Work[None]:
        """Bring the last token, and all shallower ones, to `depth`."""
        ranges, reached = catch_up_ranges(self.depths, depth)
        for begin, first, last in ranges:
            x = yield self.session.request(torch.cat(self.states[begin:]), begin, first=2 * first, last=2 * last)
            self.states[begin:] = x.split(1)
        self.depths = reached


def catch_up_ranges(depths: Sequence[int], depth: int) -> tuple[list[tuple[int, int, int]], list[int]]:
    """Plan the forwards that bring the last of some tokens to `depth`.

    `depths` are the layers that each token has run through. Returns the forwards in order, each as (first row, first
    layer, end layer): it takes all rows from that one through these layers. Returns the new depths besides.
    """
    reached = list(depths)
    ranges = list[tuple[int, int, int]]()
    while (level := reached[-1]) < depth:
        begin = reached.index(level)
        # The forward stops at the depth of the row before its first: that row joins the next one.
        until = min(depth, reached[begin - 1]) if begin else depth
        ranges.append((begin, level, until))
        reached[begin:] = [until] * (len(reached) - begin)
    return ranges, reached
