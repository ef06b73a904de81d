"""Drafts by the layer with which a model predicts the token after the next one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ssd_runtime.drafting.chain import CHAIN, Branching, Chain
from ssd_runtime.drafting.on_device import Step
from ssd_runtime.drafting.tree import Origin
from ssd_runtime.model.runner import Head, Work
from ssd_runtime.sequence.session import Session


@dataclass(frozen=True, slots=True)
class MtpChain(Chain):
    """A drafter whose tokens are the MTP layer's choices.

    The first follows the pending token and the model's own state before it. From there on the layer's output stands for
    that state, so that one layer drafts any number of tokens.
    """

    threshold: float = 0.0
    branching: Branching = CHAIN

    @property
    def origin(self) -> Origin:
        """Always `mtp`."""
        return "mtp"

    def stepping(self, session: Session) -> Step:
        """Steps of the layer and of the model's head."""
        state: Tensor | None = None

        def step(last: Sequence[int] | Tensor, ahead: int) -> Work[Tensor]:
            nonlocal state
            if state is None:
                state = yield from session.catching_up()
            else:
                state = yield session.ahead_request(last, state, ahead)
            return (yield Head(state, normed=True, drafting=True))

        return step
