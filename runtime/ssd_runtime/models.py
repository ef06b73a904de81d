"""Deprecated: where `LoadedModel` was before the package had folders."""

from ssd_runtime._moved import moved

PLACES = {
    "LoadedModel": "ssd_runtime.loading.models:LoadedModel",
    "load_model": "ssd_runtime.loading.models:load_model",
}
__getattr__ = moved(__name__, PLACES)
