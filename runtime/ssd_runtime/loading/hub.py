"""A quick test for a connection to the Hub, whose own client retries for half a minute."""

from __future__ import annotations

import os
import socket
from functools import cache
from urllib.parse import urlsplit
from urllib.request import getproxies

TIMEOUT_SECONDS = 4.0


@cache
def hub_reachable() -> bool:
    """Whether a connection to the Hub, or to the proxy that leads there, can be opened. Cached per process."""
    from huggingface_hub import constants

    if constants.is_offline_mode() or os.environ.get("HF_DATASETS_OFFLINE", "") in ("1", "true", "TRUE"):
        return False
    address = urlsplit(getproxies().get("https") or constants.ENDPOINT)
    try:
        with socket.create_connection((address.hostname or "", address.port or 443), TIMEOUT_SECONDS):
            return True
    except OSError:
        return False
