"""Waits that end."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object], what: str, seconds: float = 60.0) -> None:
    """Return when the condition holds; fail when it does not within the time."""
    latest = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < latest, f"after {seconds:g} s still not: {what}"
        time.sleep(0.01)
