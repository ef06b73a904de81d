"""The quick test for a connection takes the way that the clients will take: directly, or through a proxy."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from ssd_artifacts.sharing import reachable as module
from ssd_artifacts.sharing.reachable import reachable

HUB = "https://hub.example"


@pytest.mark.parametrize(
    ("environment", "address"),
    [
        ({}, ("hub.example", 443)),
        ({"https_proxy": "http://proxy.example:3128"}, ("proxy.example", 3128)),
        ({"https_proxy": "proxy.example:3128"}, ("proxy.example", 3128)),
        ({"https_proxy": "proxy.example:3128", "no_proxy": ".example"}, ("hub.example", 443)),
    ],
)
def test_a_proxy_counts_where_it_is_used(
    environment: dict[str, str], address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("https_proxy", "HTTPS_PROXY", "no_proxy", "NO_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    asked = list[Any]()

    def connect(place: Any, timeout: float) -> Any:
        asked.append(place)
        raise OSError

    monkeypatch.setattr(module, "socket", type("socket", (), {"create_connection": staticmethod(connect)}))
    assert not reachable(HUB)
    assert asked == [address]
    assert socket.create_connection is not connect
