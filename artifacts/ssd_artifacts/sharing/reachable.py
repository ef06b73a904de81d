"""Quick tests for a connection, since the clients of the Hub and of registries retry for minutes."""

from __future__ import annotations

import os
import socket
from functools import cache
from ipaddress import ip_address
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

TIMEOUT_SECONDS = 4.0


def is_local(host: str) -> bool:
    """Whether an address can be reached from this machine only."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@cache
def hub_reachable() -> bool:
    """Whether a connection to the Hub, or to the proxy that leads there, can be opened. Cached per process."""
    from huggingface_hub import constants

    if constants.is_offline_mode() or os.environ.get("HF_DATASETS_OFFLINE", "") in ("1", "true", "TRUE"):
        return False
    return reachable(constants.ENDPOINT)


def reachable(url: str) -> bool:
    """Whether a connection to the host of a URL can be opened; for https, to the proxy where there is one."""
    address = urlsplit(url)
    if address.scheme == "https" and not proxy_bypass(address.hostname or ""):
        proxy = getproxies().get("https", url)
        address = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    port = address.port or (80 if address.scheme == "http" else 443)
    try:
        with socket.create_connection((address.hostname or "", port), TIMEOUT_SECONDS):
            return True
    except OSError:
        return False
