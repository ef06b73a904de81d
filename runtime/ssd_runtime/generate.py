"""Deprecated: where `Limits` was before the package had folders."""

from ssd_runtime._moved import moved

PLACES = {
    "Limits": "ssd_runtime.engine.loop:Limits",
    "Generation": "ssd_runtime.engine.loop:Generation",
    "generate": "ssd_runtime.engine.loop:generate",
    "decode": "ssd_runtime.engine.loop:decode",
}
__getattr__ = moved(__name__, PLACES)
