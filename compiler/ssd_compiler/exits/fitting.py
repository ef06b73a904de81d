"""Fits exit heads in closed form: affine maps from an inner layer's states to the last layer's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from ssd_artifacts.exits import ExitSet
from ssd_compiler.calibrate import Sample
from ssd_compiler.progress import Tick
from ssd_profiles.errors import UserError
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.sequence.session import PREFILL_CHUNK, Session

RIDGES = (1e-3, 1e-2, 1e-1, 1.0)
"""Candidate ridge strengths, ÷ the mean square of a feature. The best one on held-out samples is used."""
HELD_BACK = 4
"""One sample in this many is held out from fitting; it selects the ridge and tunes how a domain exits."""


def exit_layers(num_layers: int, count: int) -> tuple[int, ...]:
    """Choose up to `count` layer numbers evenly over the depth, the last layer excluded.

    Raises UserError for a model of one layer.
    """
    if num_layers < 2:
        raise UserError("--exits: this model has one layer, so no token can exit early; omit --exits")
    count = min(count, num_layers - 1)
    return tuple(sorted({max(1, round(num_layers * (i + 1) / (count + 1))) for i in range(count)}))


def held_back(samples: Sequence[Sample]) -> tuple[Sequence[Sample], Sequence[Sample]]:
    """Split a domain's samples into those for fitting and those held out. A single sample serves as both."""
    kept = max(1, len(samples) // HELD_BACK)
    return (samples[:-kept], samples[-kept:]) if len(samples) > 1 else (samples, samples)


@torch.inference_mode()
def fit_exits(
    decoder: Decoder, samples: Sequence[Sample], held: Sequence[Sample], layers: Sequence[int], tick: Tick
) -> ExitSet:
    """Fit ridge regressions from states after `layers` to those after the last layer, all after the final norm.

    Rows are all tokens of the samples' prompts and continuations; the `held` samples select the ridge. The regression
    target is the difference from the identity, because a residual stream changes slowly. Without data, an exit
    therefore applies the model's head to the state as it is.
    """
    fits = {layer: Regression(decoder.shape.hidden) for layer in layers}
    held_rows: dict[int, list[tuple[Tensor, Tensor]]] = {layer: [] for layer in layers}
    for number, sample in enumerate([*samples, *held]):
        for states in chunked_states(decoder, sample):
            last = _wide(decoder.head.norm(states[-1]))
            for layer in layers:
                x = _wide(decoder.head.norm(states[2 * layer]))
                if number < len(samples):
                    fits[layer].update(x, last)
                else:
                    held_rows[layer].append((x, last))
        tick()
    solved = [fits[layer].best(held_rows[layer]) for layer in layers]
    return ExitSet(
        tuple(layers),
        np.stack([weight.cpu().numpy().astype(np.float16) for weight, _ in solved]),
        np.stack([bias.cpu().numpy().astype(np.float16) for _, bias in solved]),
    )


class Regression:
    """Accumulates the normal equations of y - x = [x, 1] A in fp64."""

    def __init__(self, width: int) -> None:
        self._gram = torch.zeros(width + 1, width + 1, dtype=torch.float64)
        self._cross = torch.zeros(width + 1, width, dtype=torch.float64)

    def update(self, x: Tensor, y: Tensor) -> None:
        """Add rows x and y [n, width]."""
        left = torch.cat([x, torch.ones(len(x), 1)], 1).double()
        right = (y - x).double()
        self._gram += left.T @ left
        self._cross += left.T @ right

    def best(self, held: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Solve for weight [width, width] and bias [width] of y = x W + b, with the ridge of least error on `held`."""
        found = [self._solve(ridge) for ridge in RIDGES]
        errors = [sum(float(((x @ weight + bias - y) ** 2).sum()) for x, y in held) for weight, bias in found]
        return found[int(np.argmin(errors))]

    def _solve(self, ridge: float) -> tuple[Tensor, Tensor]:
        width = self._cross.shape[1]
        pull = torch.full((width + 1,), ridge * float(self._gram.diagonal()[:-1].mean()), dtype=torch.float64)
        pull[-1] = 1e-9  # the bias is not penalised
        change = torch.linalg.solve(self._gram + torch.diag(pull), self._cross)
        return (change[:-1] + torch.eye(width, dtype=torch.float64)).float(), change[-1].float()


def _wide(x: Tensor) -> Tensor:
    """Convert to fp32 on the CPU, where the regressions are solved."""
    return x.float().cpu()


@torch.inference_mode()
def chunked_states(decoder: Decoder, sample: Sample) -> Iterator[list[Tensor]]:
    """Run the full model over a sample and yield its 2L + 1 states [tokens, hidden], chunk by chunk."""
    session = Session(decoder)
    ids = sample.prompt + sample.continuation[:-1]
    for begin in range(0, len(ids), PREFILL_CHUNK):
        chunk = ids[begin : begin + PREFILL_CHUNK]
        states = session.forward_states(chunk)
        session.commit(chunk)
        yield states
