"""Web pages reach a local server under names of this machine alone, unless others are allowed."""

from __future__ import annotations

import http.client
import json
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.folders import save_tiny_model
from tests.serving import serving, tiny_engine, tiny_service


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def ask(address: str, **headers: str) -> tuple[int, str]:
    """Status and message of a response."""
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=60)
    connection.putrequest("GET", "/v1/models", skip_host="Host" in headers)
    for name, value in headers.items():
        connection.putheader(name, value)
    connection.endheaders()
    response = connection.getresponse()
    return response.status, json.loads(response.read()).get("error", {}).get("message", "")


OWN = ["localhost", "LOCALHOST:8000", "localhost.", "127.0.0.1:80", "127.8.0.1", "[::1]", "[::1]:8000"]
FOREIGN = ["evil.example", "evil.example:8000", "localhost.evil.example", "evil@example", "127.0.0.1.evil.example", "["]


def test_names_of_this_machine_are_served_and_others_refused(folder: Path) -> None:
    with serving(tiny_service(tiny_engine(folder), allowed_hosts=())) as address:
        for host in OWN:
            assert ask(address, Host=host)[0] == 200, host
            assert ask(address, Origin=f"http://{host}")[0] == 200, host
        for host in FOREIGN:
            status, message = ask(address, Host=host)
            assert (status, "--allow-host" in message) == (403, True), host
        for origin in [*(f"https://{host}" for host in FOREIGN), "null", "file://"]:
            status, message = ask(address, Origin=origin)
            assert (status, "--allow-origin" in message) == (403, True), origin


def test_what_is_allowed_is_served(folder: Path) -> None:
    changes = {"allowed_hosts": ("Chat.example",), "allowed_origins": ("https://a.example",)}
    with serving(tiny_service(tiny_engine(folder), **changes)) as address:
        assert ask(address, Host="chat.example:443", Origin="https://chat.example")[0] == 200
        assert ask(address, Origin="https://a.example")[0] == 200
        assert ask(address, Host="a.example")[0] == 403
        assert ask(address, Origin="http://a.example")[0] == 403
    for hosts in (None, ("*",)):
        with serving(tiny_service(tiny_engine(folder), allowed_hosts=hosts)) as address:
            assert ask(address, Host="evil.example")[0] == 200
