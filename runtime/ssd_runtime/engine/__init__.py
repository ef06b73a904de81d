"""The engine, the decode loop and its results."""

from ssd_runtime._moved import moved

PLACES = {"Engine": "ssd_runtime.engine.engine:Engine"}
__getattr__ = moved(__name__, PLACES)
