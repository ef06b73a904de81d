"""Chains of draft steps whose tokens stay on the device, because every read by the host waits for it."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ssd_runtime.model.runner import Read, Work
from ssd_runtime.sampling.argmax import argmax, argmax_with_logit

STEPS_PER_READ = 2
"""Draft steps between two looks at their confidence. With more, fewer reads wait for the device, but a step after an
unsure token is wasted, which takes far longer than a wait. The best number was not measured on a card."""
Step = Callable[[Sequence[int] | Tensor, int], Work[Tensor]]
"""Runs a draft step on the latest token [1], on the host or on the device, which comes so many places after the pending
one; returns logits [1, vocabulary]."""


@dataclass(frozen=True, slots=True)
class ReadStep:
    """A draft step that the host has read."""

    token: int
    nll: float
    """Negative log of the confidence in the token."""
    best: list[int]
    """The most probable tokens, best first."""


@dataclass(slots=True)
class DeviceChain:
    """A chain of greedy draft steps, the first of which the host may have read."""

    step: Step
    confidence: bool
    """Whether the confidence in tokens is computed."""
    candidates: int
    """Number of most probable tokens that are kept of every step."""
    steps: list[Tensor] = field(default_factory=list)
    """Per step the token, and if confidence is computed the bits of its nll and the most probable tokens."""
    read: list[ReadStep] = field(default_factory=list)

    @property
    def tokens(self) -> Tensor:
        """The tokens [n] of all steps."""
        return torch.stack(self.steps)[:, 0]

    def growing(self, pending: int, length: int, most_nll: float) -> Work[None]:
        """Draft up to `length` tokens after `pending`; end after a token that is read and exceeds `most_nll`."""
        while len(self.steps) < length:
            last = self.steps[-1][:1] if self.steps else [pending]
            logits = yield from self.step(last, len(self.steps))
            self.steps.append(_numbers(logits, self.candidates) if self.confidence else argmax(logits))
            if math.isfinite(most_nll) and len(self.steps) % STEPS_PER_READ == 0 and len(self.steps) < length:
                yield from self.reading(most_nll)
                if len(self.steps) % STEPS_PER_READ or is_unsure(self.read[-1].nll, most_nll):
                    break

    def reading(self, most_nll: float) -> Work[None]:
        """Read all steps, and drop those after the first token whose nll exceeds `most_nll`."""
        fresh = self.steps[len(self.read) :]
        if fresh:
            numbers = yield Read(torch.cat(fresh))
            width = len(numbers) // len(fresh)
            self.read += [_step(numbers[at : at + width]) for at in range(0, len(numbers), width)]
        kept = next(
            (place + 1 for place, step in enumerate(self.read) if is_unsure(step.nll, most_nll)), len(self.read)
        )
        del self.read[kept:], self.steps[kept:]


def is_unsure(nll: float, most_nll: float) -> bool:
    """Whether a draft ends with a token of this nll, which is NaN where a head scores no token that is allowed."""
    return not nll <= most_nll


def _numbers(logits: Tensor, candidates: int) -> Tensor:
    """The token of `logits` [1, vocabulary], the bits of its nll and the most probable tokens, as whole numbers."""
    token, top = argmax_with_logit(logits)
    nll = (logits.float() - top[:, None].float()).logsumexp(-1)
    parts = [token, nll.view(torch.int32).to(torch.int64)]
    if candidates:
        parts.append(logits[0].topk(min(candidates, logits.shape[-1])).indices)
    return torch.cat(parts)


def _step(numbers: Sequence[int]) -> ReadStep:
    [nll] = struct.unpack("f", struct.pack("i", numbers[1]))
    return ReadStep(token=numbers[0], nll=nll, best=list(numbers[2:]))
