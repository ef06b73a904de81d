"""Drafts by the model itself with some sub-layers skipped or on light copies of their weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ssd_profiles.mask import SubLayerPlan
from ssd_runtime.drafting.chain import CHAIN, Branching, Chain
from ssd_runtime.drafting.on_device import Step
from ssd_runtime.drafting.tree import Origin
from ssd_runtime.model.runner import Head, Work
from ssd_runtime.sequence.session import Session


@dataclass(frozen=True, slots=True)
class Masked(Chain):
    """A drafter whose tokens are the masked model's choices."""

    mask: SubLayerPlan
    threshold: float = 0.0
    branching: Branching = CHAIN

    @property
    def origin(self) -> Origin:
        """`light` if nothing is skipped."""
        return "skipped" if any(self.mask.skipped) else "light"

    def stepping(self, session: Session) -> Step:
        """Steps of the masked model."""

        def step(last: Sequence[int] | Tensor, ahead: int) -> Work[Tensor]:
            x = yield session.request(last, ahead, self.mask)
            return (yield Head(x, bits=self.mask.head_bits, drafting=True))

        return step
