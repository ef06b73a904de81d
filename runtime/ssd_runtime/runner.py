"""Deprecated: where `RunSettings` was before the package had folders."""

from ssd_runtime._moved import moved

PLACES = {
    "RunSettings": "ssd_runtime.engine.runner:RunSettings",
    "Runner": "ssd_runtime.engine.runner:Runner",
}
__getattr__ = moved(__name__, PLACES)
