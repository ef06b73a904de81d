"""The process around the application: its address, and its signals."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

import pytest

from ssd_profiles.errors import UserError
from ssd_runtime.serving.http.listening import listen
from tests.folders import save_tiny_model
from tests.ports import unused_port
from tests.served import log_of, post, server


def test_an_address_is_one_servers_while_it_loads() -> None:
    """The second is told at once, not when both have loaded their models."""
    port = unused_port()
    with listen("127.0.0.1", port):
        for host in ("127.0.0.1", "0.0.0.0"):
            with pytest.raises(UserError, match="cannot be listened on"):
                listen(host, port)
    listen("127.0.0.1", port).close()


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="this system has no such signal")
def test_a_server_without_a_bundle_outlives_a_hang_up_and_leaves_its_address_free(tmp_path: Path) -> None:
    """The connections that it ends, which the system remembers for a minute, keep no other server from the address."""
    save_tiny_model(tmp_path / "model")
    port = unused_port()
    for _ in range(2):
        with server(tmp_path, "--port", str(port)) as (process, address):
            stream = post(address, max_tokens=200, stream=True)
            process.send_signal(signal.SIGHUP)
            assert stream.read().endswith(b"data: [DONE]\n\n")
            assert post(address, max_tokens=1).status == 200
            assert "SIGHUP: there is no bundle" in log_of(tmp_path)
            with socket.create_connection(("127.0.0.1", port)):
                process.send_signal(signal.SIGTERM)
                assert process.wait(60) == 0
