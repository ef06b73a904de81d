"""Former import paths of the package, which still work with a deprecation warning."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def moved(module: str, places: Mapping[str, str]) -> Callable[[str], Any]:
    """Make a module's `__getattr__` that imports each moved name from its new place, `package.module:name`."""

    def find(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        home, _, now = places[name].partition(":")
        shown = f"from ssd_runtime import {now}" if now in FRONT_DOOR else f"from {home} import {now}"
        warnings.warn(f"{module}.{name} has moved: {shown}", DeprecationWarning, stacklevel=2)
        return getattr(import_module(home), now)

    return find


FRONT_DOOR = {
    "CustomGenerate": "ssd_runtime.serving.generate.custom_generate",
    "Engine": "ssd_runtime.engine.engine",
    "RunSettings": "ssd_runtime.engine.offline.runner",
    "SamplingParams": "ssd_runtime.sampling.params",
}
"""Names that `ssd_runtime` exports, with the modules that define them."""
