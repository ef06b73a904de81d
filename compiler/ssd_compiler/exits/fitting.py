"""Exit heads, fitted in closed form: what the last layer would make of an inner layer's state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from ssd_artifacts.exits import ExitSet
from ssd_compiler.calibrate import Sample
from ssd_profiles.errors import UserError
from ssd_runtime.engine.session import PREFILL_CHUNK, Session
from ssd_runtime.model.decoder import Decoder

RIDGES = (1e-3, 1e-2, 1e-1, 1.0)
"""Strengths of the pull towards leaving states as they are, ÷ the mean square of a feature; the best one is taken."""
HELD_BACK = 4
"""One in so many samples is kept from the fit: it decides on the strength, and how a domain uses the exits."""

Tick = Callable[[], None]


def exit_layers(num_layers: int, count: int) -> tuple[int, ...]:
    """`count` numbers of layers spread over the depth, the last layer left out; fewer where there are no more.

    Raises UserError for a model of one layer.
    """
    if num_layers < 2:
        raise UserError("--exits: this model has one layer, there is none to leave behind; leave --exits away")
    count = min(count, num_layers - 1)
    return tuple(sorted({max(1, round(num_layers * (i + 1) / (count + 1))) for i in range(count)}))


def held_back(samples: Sequence[Sample]) -> tuple[Sequence[Sample], Sequence[Sample]]:
    """A domain's samples that heads are fitted on, and those that are kept from the fit; a single one is both."""
    kept = max(1, len(samples) // HELD_BACK)
    return (samples[:-kept], samples[-kept:]) if len(samples) > 1 else (samples, samples)


@torch.inference_mode()
def fit_exits(
    decoder: Decoder, samples: Sequence[Sample], held: Sequence[Sample], layers: Sequence[int], tick: Tick
) -> ExitSet:
    """Ridge regressions from states behind `layers` to those behind the last, both behind the final norm.

    On all tokens of the samples' prompts and continuations; `held` samples decide how strongly to pull towards the
    identity. What is regressed is the difference from it, since a residual stream changes slowly: without data an
    exit is the model's head on the state as it is.
    """
    fits = {layer: Regression(decoder.shape.hidden) for layer in layers}
    judges: dict[int, list[tuple[Tensor, Tensor]]] = {layer: [] for layer in layers}
    for number, sample in enumerate([*samples, *held]):
        for states in chunked_states(decoder, sample):
            last = _wide(decoder.norm(states[-1]))
            for layer in layers:
                x = _wide(decoder.norm(states[2 * layer]))
                if number < len(samples):
                    fits[layer].add(x, last)
                else:
                    judges[layer].append((x, last))
        tick()
    solved = [fits[layer].best(judges[layer]) for layer in layers]
    return ExitSet(
        tuple(layers),
        np.stack([weight.cpu().numpy().astype(np.float16) for weight, _ in solved]),
        np.stack([bias.cpu().numpy().astype(np.float16) for _, bias in solved]),
    )


class Regression:
    """Sums over rows for y - x = [x, 1] A, in fp64."""

    def __init__(self, width: int) -> None:
        self._gram = torch.zeros(width + 1, width + 1, dtype=torch.float64)
        self._cross = torch.zeros(width + 1, width, dtype=torch.float64)

    def add(self, x: Tensor, y: Tensor) -> None:
        """Take in rows [n, width]."""
        left, right = torch.cat([x, torch.ones(len(x), 1)], 1).double(), (y - x).double()
        self._gram += left.T @ left
        self._cross += left.T @ right

    def best(self, held: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Weight [width, width] and bias [width] of y = x W + b, of the strength that errs least on `held` rows."""
        found = [self._solve(ridge) for ridge in RIDGES]
        errors = [sum(float(((x @ weight + bias - y) ** 2).sum()) for x, y in held) for weight, bias in found]
        return found[int(np.argmin(errors))]

    def _solve(self, ridge: float) -> tuple[Tensor, Tensor]:
        width = self._cross.shape[1]
        pull = torch.full((width + 1,), ridge * float(self._gram.diagonal()[:-1].mean()), dtype=torch.float64)
        pull[-1] = 1e-9  # a bias costs nothing
        change = torch.linalg.solve(self._gram + torch.diag(pull), self._cross)
        return (change[:-1] + torch.eye(width, dtype=torch.float64)).float(), change[-1].float()


def _wide(x: Tensor) -> Tensor:
    """Where the regressions are, in fp32."""
    return x.float().cpu()


@torch.inference_mode()
def chunked_states(decoder: Decoder, sample: Sample) -> Iterator[list[Tensor]]:
    """The full model's 2L + 1 states [tokens, hidden] on a sample's prompt and continuation, some tokens at a time."""
    session, ids = Session(decoder), sample.prompt + sample.continuation[:-1]
    for begin in range(0, len(ids), PREFILL_CHUNK):
        chunk = ids[begin : begin + PREFILL_CHUNK]
        states = session.forward_states(chunk)
        session.commit(chunk)
        yield states
