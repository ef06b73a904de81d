"""Which matmul kernel serves how many rows: measured on the device once, and remembered in the user's cache."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ssd_artifacts.files import cache_folder, remember
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.profiling.clock import seconds
from ssd_runtime.profiling.latency import device_key
from ssd_runtime.profiling.memory import available_bytes

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 32, 256)
"""Numbers of rows that are timed; others go with the next lower one."""
ROUNDS = 5
TIMED_BYTES = 128 << 20
"""Packed weights that a timing goes through, at least: more than a processor's cache holds."""
MARGIN = 0.93
"""The modules serve where they take less than this of the packed copies' time in every round: a noisy machine must not
choose them, since they are much slower for several rows on most processors and for one row on some."""
STEADY = 1.5
"""Slowest ÷ fastest round of a machine whose choice is worth remembering: another process at work shows as more."""
SMALL_BYTES = 8 << 20
"""Packed weights up to this stay in a processor's cache: too small for the choice to matter or to be measured well."""
MEMORY_SHARE = 0.5
"""Of the memory that is free once the model is loaded, what packed copies may take by default."""


def fitted_decoder(model: PreTrainedModel, weight_memory: int | None = None) -> Decoder:
    """A decoder whose projections are served by what is fastest on its device for each number of rows.

    Packed copies of weights take at most `weight_memory` bytes. Measures for about a second on the first run with
    a model of these sizes on this device.
    """
    if weight_memory is None:
        weight_memory = int(MEMORY_SHARE * available_bytes(model.device))
    decoder = Decoder(model, weight_memory)
    if decoder.packed.used > SMALL_BYTES:
        faster = _remembered(_path(decoder), partial(measured, decoder))
        decoder.serve([faster[bisect_right(ROWS, n) - 1] for n in range(1, ROWS[-1] + 1)])
    return decoder


@torch.inference_mode()
def measured(decoder: Decoder) -> tuple[list[bool], bool]:
    """For each of `ROWS`, whether packed copies should serve; and whether the machine was steady meanwhile.

    Timed on MLP blocks, in turn.
    """
    per_layer = max(1, decoder.packed.used // decoder.shape.num_layers)
    layers = min(decoder.shape.num_layers, -(-TIMED_BYTES // per_layer))
    taken: dict[tuple[int, bool], list[float]] = {(n, served): [] for n in ROWS for served in (False, True)}
    for number in range(ROUNDS + 1):
        for (n, served), times in taken.items():
            decoder.serve([served])
            elapsed = seconds(partial(_mlps, decoder, layers, decoder.embed([1] * n)), decoder.device)
            if number:  # the first round warms up
                times.append(elapsed)
    return choice(taken), median(max(times) / min(times) for times in taken.values()) < STEADY


def choice(taken: Mapping[tuple[int, bool], Sequence[float]]) -> list[bool]:
    """Whether packed copies should serve each of `ROWS`, from the times of the rounds by (rows, packed)."""
    rounds = {n: zip(taken[n, False], taken[n, True], strict=True) for n in ROWS}
    return [any(modules >= MARGIN * packed for modules, packed in rounds[n]) for n in ROWS]


def _mlps(decoder: Decoder, layers: int, x: Tensor) -> None:
    for layer in range(layers):
        decoder.mlp(layer, x)


def _remembered(path: Path, measure: Callable[[], tuple[list[bool], bool]]) -> list[bool]:
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(known, list) and len(known) == len(ROWS):
            return [bool(faster) for faster in known]
    except (OSError, ValueError):
        pass
    found, steady = measure()
    if steady:
        remember(path, json.dumps(found))
    return found


def _path(decoder: Decoder) -> Path:
    sizes = [decoder.shape.hidden, decoder.shape.num_layers, decoder.packed.used]
    digest = hashlib.sha256(json.dumps(sizes).encode()).hexdigest()[:8]
    return cache_folder() / "kernels" / f"{device_key(decoder).slug()}-{digest}.json"
