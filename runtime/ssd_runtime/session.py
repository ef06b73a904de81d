"""Deprecated: where `Session` was before the package had folders."""

from ssd_runtime._moved import moved

PLACES = {
    "Session": "ssd_runtime.engine.sequence.session:Session",
}
__getattr__ = moved(__name__, PLACES)
