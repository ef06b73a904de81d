"""Chooses the matmul kernel per number of rows. It is measured once per device and cached for the user."""

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
from ssd_runtime.devices.clock import STEADY, seconds
from ssd_runtime.devices.memory import available_bytes
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.profiling.latency import device_key

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 32, 256)
"""Numbers of rows that are timed. Other numbers use the next lower entry."""
ROUNDS = 5
TIMED_BYTES = 128 << 20
"""Least bytes of packed weights per timing: more than a processor's cache holds."""
MARGIN = 0.93
"""The modules serve only if they take less than this share of the packed copies' time in every round. Noise must not
choose them, since they are much slower for several rows on most processors."""
SMALL_BYTES = 8 << 20
"""Packed weights up to this size fit a processor's cache, where the choice hardly matters and cannot be measured
well."""
MEMORY_SHARE = 0.5
"""Default bound of packed copies, as a share of the memory that is free once the model is loaded."""


def fitted_decoder(
    model: PreTrainedModel, weight_memory: int | None = None, bitwise: bool = False, kv_bits: int | None = None
) -> Decoder:
    """Build a decoder that uses the fastest kernel for each number of rows on its device.

    Packed copies of weights take at most `weight_memory` bytes. The first run with a model of these sizes on this
    device measures for about a second. With `bitwise` (`Decoder`) packed copies serve any number of rows. `kv_bits` is
    the decoder's.
    """
    if weight_memory is None:
        weight_memory = int(MEMORY_SHARE * available_bytes(model.device))
    decoder = Decoder(model, weight_memory, bitwise, kv_bits)
    if not bitwise and decoder.packed.used > SMALL_BYTES:
        faster = _remembered(_path(decoder), partial(measured, decoder))
        decoder.projections.serve([faster[bisect_right(ROWS, n) - 1] for n in range(1, ROWS[-1] + 1)])
    return decoder


def outgrows_cache(decoder: Decoder) -> bool:
    """Whether a model's weights are more than a processor's cache holds, so that steps wait for reading them."""
    return decoder.packed.used + decoder.projections.native_bytes > SMALL_BYTES


@torch.inference_mode()
def measured(decoder: Decoder) -> tuple[list[bool], bool]:
    """Measure for each of `ROWS` whether packed copies should serve, and whether the machine was steady.

    MLP blocks are timed with both kernels in turn, or attention's first projections where these alone have copies.
    """
    per_layer = max(1, decoder.packed.used // decoder.shape.num_layers)
    layers = min(decoder.shape.num_layers, -(-TIMED_BYTES // per_layer))
    taken: dict[tuple[int, bool], list[float]] = {(n, served): [] for n in ROWS for served in (False, True)}
    for number in range(ROUNDS + 1):
        for (n, served), times in taken.items():
            decoder.projections.serve([served])
            elapsed = seconds(partial(_projected, decoder, layers, decoder.embed([1] * n)), decoder.device)
            if number:  # the first round warms up
                times.append(elapsed)
    return choice(taken), median(max(times) / min(times) for times in taken.values()) < STEADY


def choice(taken: Mapping[tuple[int, bool], Sequence[float]]) -> list[bool]:
    """Decide for each of `ROWS` whether packed copies should serve.

    `taken` maps (rows, packed) to the seconds of each round.
    """
    rounds = {n: zip(taken[n, False], taken[n, True], strict=True) for n in ROWS}
    return [any(modules >= MARGIN * packed for modules, packed in rounds[n]) for n in ROWS]


def _projected(decoder: Decoder, layers: int, x: Tensor) -> None:
    for layer in range(layers):
        if any(linear.packed for linear in decoder.layers[layer].mlp.linears()):
            decoder.sublayers.mlp(layer, x)
        else:
            decoder.layers[layer].qkv_of(x)


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
