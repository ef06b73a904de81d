"""The runtime, which decodes with or without a bundle.

The front door is `from ssd_runtime import Engine, RunSettings, SamplingParams, Structure`, and for
transformers' own `generate`, `from ssd_runtime import CustomGenerate, StructureProcessor`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ssd_runtime.engine.engine import Engine
    from ssd_runtime.engine.turn import RunSettings
    from ssd_runtime.sampling.params import SamplingParams
    from ssd_runtime.serving.generate.custom_generate import CustomGenerate
    from ssd_runtime.structure.processor import StructureProcessor
    from ssd_runtime.structure.structure import Structure

__all__ = ["CustomGenerate", "Engine", "RunSettings", "SamplingParams", "Structure", "StructureProcessor"]
FRONT_DOOR = {
    "CustomGenerate": "ssd_runtime.serving.generate.custom_generate",
    "Engine": "ssd_runtime.engine.engine",
    "RunSettings": "ssd_runtime.engine.turn",
    "SamplingParams": "ssd_runtime.sampling.params",
    "Structure": "ssd_runtime.structure.structure",
    "StructureProcessor": "ssd_runtime.structure.processor",
}
"""The names in `__all__`, with the modules that define them."""


def __getattr__(name: str) -> Any:
    # The import is deferred, because torch takes seconds and the commands answer bad input before that.
    if name in FRONT_DOOR:
        return getattr(import_module(FRONT_DOOR[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
