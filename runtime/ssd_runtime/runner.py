"""Deprecated: where `RunSettings` was before the package had folders."""

from ssd_runtime._moved import moved

PLACES = {
    "RunSettings": "ssd_runtime.engine.offline.runner:RunSettings",
    "Runner": "ssd_runtime.engine.offline.runner:Runner",
}
__getattr__ = moved(__name__, PLACES)
