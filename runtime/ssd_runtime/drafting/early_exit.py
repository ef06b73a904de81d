"""Drafts by the model's first layers, whose work verification goes on from (SpecBound §2.3)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ssd_profiles.formulas import annealed_temperature
from ssd_runtime.drafting.tree import Draft, PartialForward
from ssd_runtime.engine.session import Session
from ssd_runtime.model.exit_heads import ExitHeads
from ssd_runtime.model.runner import Head, Work
from ssd_runtime.sampling.sampler import Proposal


@dataclass(frozen=True, slots=True)
class EarlyExit:
    """Each token leaves behind the first of `stops` layers where it is sure enough; the last stop is the depth bound.

    A token that is not sure there ends the draft: it is not guessed at, but joins the verification, which yields
    its successor. Where the draft ends by its length instead, its last token is brought as deep as the deepest
    before it together with those that left earlier, and joins the verification too, for the bonus token.
    """

    heads: ExitHeads
    stops: tuple[int, ...]
    """Layers behind which a token may leave, ascending."""
    threshold: float
    annealing: float = 0.0

    def drafting(self, session: Session, pending: int, length: int) -> Work[Draft]:
        """Draft up to `length` tokens."""
        rows, path, probs = _Rows(session), [pending], list[Tensor]()
        rows.add(pending)
        while (proposal := (yield from self._leaving(rows, path))) is not None:
            path.append(proposal.token)
            if proposal.probs is not None:
                probs.append(proposal.probs)
            rows.add(proposal.token)
            if len(path) == length + 1:
                yield from rows.advancing(rows.deepest)
                break
        begun = PartialForward(2 * rows.deepest, torch.cat(rows.states))
        return Draft(path[1:], begun=begun, probs=probs, steps=len(path) - 1)

    def _leaving(self, rows: _Rows, path: list[int]) -> Work[Proposal | None]:
        """The token behind the last row, from the first layer that is sure of one; None where none is."""
        layers = rows.session.decoder.shape.num_layers
        for stop in self.stops:
            yield from rows.advancing(stop)
            temperature = annealed_temperature(stop, layers, self.annealing)
            [logits] = yield Head(self.heads.carried(stop, rows.states[-1]), normed=True)
            proposal = rows.session.propose(logits, lambda: path, temperature)
            if math.exp(-proposal.nll) >= self.threshold:
                return proposal
        return None


@dataclass(slots=True)
class _Rows:
    """The hidden-state cache: how deep each token has got, and its state there.

    A token needs the keys of those before it in every layer it runs through. So where it goes deeper than these
    went, they come along from where they left: depths never rise from one row to the next.
    """

    session: Session
    states: list[Tensor] = field(default_factory=list)
    """Each [1, hidden]."""
    depths: list[int] = field(default_factory=list)

    @property
    def deepest(self) -> int:
        """Layers that the first token has been through."""
        return self.depths[0]

    def add(self, token: int) -> None:
        """One token more, at its embedding."""
        self.states.append(self.session.decoder.embed([token]))
        self.depths.append(0)

    def advancing(self, depth: int) -> Work[None]:
        """Bring the last token to `depth`, and with it all that are not as deep."""
        for begin, first, last in catch_up_ranges(self.depths, depth):
            x = yield self.session.request(torch.cat(self.states[begin:]), begin, first=2 * first, last=2 * last)
            self.states[begin:] = x.split(1)


def catch_up_ranges(depths: list[int], depth: int) -> Iterator[tuple[int, int, int]]:
    """What brings the last of some tokens to `depth`: (first of the rows, from layer, to layer), one behind the other.

    Each runs the rows from that one to the last; `depths`, the layers that each token has been through, follow.
    """
    while (level := depths[-1]) < depth:
        begin = depths.index(level)
        # Those just ahead are joined where they left.
        until = min(depth, depths[begin - 1]) if begin else depth
        yield begin, level, until
        depths[begin:] = [until] * (len(depths) - begin)
