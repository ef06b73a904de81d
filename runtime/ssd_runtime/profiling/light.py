"""Measures what a draft step on lighter copies of the weights saves."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from ssd_artifacts.files import cache_folder, remember
from ssd_profiles.latency import LatencyTable
from ssd_runtime.engine.sequence.session import Session
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.model.runner import Head, ModelRunner, Work
from ssd_runtime.profiling.clock import seconds
from ssd_runtime.profiling.latency import device_key
from ssd_runtime.sampling.argmax import argmax

CONTEXT = 256
"""Tokens before the timed steps, at most half of the model's context."""
ROUNDS = 15
STEADY = 1.5
"""Largest ratio of slowest to fastest round for which a measurement is kept for later runs."""


@dataclass(frozen=True, slots=True)
class LightSaving:
    """The time that a light draft step saves, measured in turn with plain steps.

    Attention reads the same keys in both, so the seconds saved are the same at every context.
    """

    share: float
    """Share of a plain step at `context` tokens that a light step saves."""
    context: int

    def draft_cost(self, latency: LatencyTable, context: float) -> float:
        """Cost of a light draft step at any context length, in plain steps."""
        saved = self.share * latency.step_seconds(self.context)
        return 1.0 - saved / latency.step_seconds(context)


def known_saving(decoder: Decoder, model_key: str) -> LightSaving:
    """The saving of the decoder's lighter copies on this device: the user cache's, or a new one that is kept there."""
    path = _path(decoder, model_key)
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        return LightSaving(float(known["share"]), int(known["context"]))
    except (OSError, ValueError, KeyError, TypeError):
        saving, steady = measure_saving(decoder)
        if steady:
            remember(path, json.dumps({"share": saving.share, "context": saving.context}))
        return saving


@torch.inference_mode()
def measure_saving(decoder: Decoder) -> tuple[LightSaving, bool]:
    """Measure a light step against a plain one, in turn; returns the saving and whether the machine was steady."""
    session = Session(decoder)
    context = min(CONTEXT, decoder.shape.max_context // 2)
    session.prefill([(17 + 31 * i) % decoder.shape.vocabulary for i in range(context)])
    taken = list[tuple[float, float]]()
    for _ in range(ROUNDS + 1):
        plain, light = (seconds(_step(session, light), decoder.device) for light in (False, True))
        taken.append((plain, light))
    del taken[0]  # the first round warms up
    share = 1.0 - median(light / plain for plain, light in taken)
    steady = all(max(times) < STEADY * min(times) for times in zip(*taken, strict=True))
    return LightSaving(share, context), steady


def _step(session: Session, light: bool) -> Callable[[], object]:
    def work() -> Work[list[int]]:
        x = yield session.request([1], light=light)
        logits = yield Head(x, light=light)
        return argmax(logits).tolist()

    return lambda: ModelRunner(session.decoder).finish(work())


def _path(decoder: Decoder, model_key: str) -> Path:
    digest = hashlib.sha256(decoder.light.encode()).hexdigest()[:8]
    return cache_folder() / "light" / model_key[:16] / f"{device_key(decoder).slug()}-{digest}.json"
