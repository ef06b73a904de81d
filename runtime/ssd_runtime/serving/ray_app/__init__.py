"""Several replicas of a server on Ray Serve. `router.py` is the page to read first; `build` is for `serve run`."""

from ssd_runtime.serving.ray_app.application import build

__all__ = ["build"]
