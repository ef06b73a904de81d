"""Quick tests for a connection, since the clients of the Hub and of registries retry for minutes."""

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
    return reachable(constants.ENDPOINT)


def reachable(url: str) -> bool:
    """Whether a connection to the host of a URL can be opened; for https, to the proxy where there is one."""
    direct = urlsplit(url)
    address = urlsplit(getproxies().get("https", url)) if direct.scheme == "https" else direct
    port = address.port or (80 if address.scheme == "http" else 443)
    try:
        with socket.create_connection((address.hostname or "", port), TIMEOUT_SECONDS):
            return True
    except OSError:
        return False
