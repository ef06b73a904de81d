"""Engine, the decode loop and what it reports."""

from ssd_runtime._moved import moved

PLACES = {"Engine": "ssd_runtime.engine.engine:Engine"}
__getattr__ = moved(__name__, PLACES)
