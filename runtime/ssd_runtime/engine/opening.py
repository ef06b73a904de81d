"""Opens an engine for a command, with notes for its user."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ssd_runtime.loading.source import ModelSource
from ssd_runtime.weights.draft_bits import DraftBits

if TYPE_CHECKING:
    from ssd_runtime.engine.engine import Engine


@dataclass(frozen=True)
class LoadSettings:
    """Settings for loading a model's weights, and its device; None is the default of a setting."""

    device: str | None = None
    dtype: str | None = None
    weights: str | None = None
    weight_memory: int | None = None
    """Bytes for packed copies of weights."""
    threads: int | None = None
    draft_bits: DraftBits = "auto"
    bitwise: bool = False
    """Whether no bit of logits may depend on drafts."""
    kv_bits: int | None = None
    """Bits of a number of keys and values in the cache: 8, or None for the rows' own."""
    allow_special: bool = False
    """Whether control tokens that prompts spell take effect."""


def open_engine(
    source: ModelSource, settings: LoadSettings, note: Callable[[str], object], measure_later: bool = False
) -> Engine:
    """Load the model and check that the bundle fits it.

    `note` receives one line per message for the user. Messages are about what was requantised, chosen, ignored, copied
    or measured, about busy processors, and about a missing C compiler. `measure_later` is the engine's.
    Raises UserError if the model cannot be loaded or the bundle belongs to another one.
    """
    # These imports take seconds.
    import torch

    from ssd_runtime.devices.threads import use_threads
    from ssd_runtime.engine.engine import Engine, IgnoredSettingsWarning
    from ssd_runtime.loading.models import load_model
    from ssd_runtime.profiling.other_work import OtherWork, busy_note
    from ssd_runtime.weights.native.library import missing_note

    use_threads(settings.threads)
    others = OtherWork()
    weights = source.weights(settings.weights, settings.device, settings.dtype)
    loaded = load_model(source.model, settings.device, settings.dtype, weights, settings.allow_special)
    for line in loaded.notes:
        note(line)
    if told := busy_note(others.processors(), torch.get_num_threads(), os.cpu_count() or 1):
        note(told)
    compiled = loaded.model.device.type == "cpu" and (settings.draft_bits != "none" or weights == "packed")
    if compiled and (told := missing_note()):
        note(told)
    with warnings.catch_warnings(record=True, action="always", category=IgnoredSettingsWarning) as ignored:
        engine = Engine(
            loaded=loaded,
            bundle=source.bundle,
            where=source.where,
            weight_memory=settings.weight_memory,
            draft_bits=settings.draft_bits,
            say=note,
            bitwise=settings.bitwise,
            kv_bits=settings.kv_bits,
            measure_later=measure_later,
        )
    for warning in ignored:
        note(str(warning.message))
    return engine
