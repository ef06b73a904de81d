"""The process around the application: its address, and its signals."""

from __future__ import annotations

import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ssd_profiles.errors import UserError
from ssd_runtime.serving.http.listening import listen
from tests.folders import save_tiny_model
from tests.ports import unused_port
from tests.served import log_of, post, server
from tests.serving import ENDLESS, TOOL_TEMPLATE

LOOPING = "{% if messages[0].content == 'loop' %}" + ENDLESS + "{% endif %}" + TOOL_TEMPLATE


def test_an_address_is_one_servers_while_it_loads() -> None:
    """The second is told at once, not when both have loaded their models."""
    port = unused_port()
    with listen("127.0.0.1", port):
        for host in ("127.0.0.1", "0.0.0.0"):
            with pytest.raises(UserError, match="cannot be listened on"):
                listen(host, port)
    listen("127.0.0.1", port).close()


def test_a_server_outlives_a_hang_up_and_ends_when_it_is_told_to(tmp_path: Path) -> None:
    """Conversations whose templates loop do not keep it. The connections that it ends, which the system remembers for
    a minute, keep no other server from the address."""
    save_tiny_model(tmp_path / "model")
    (tmp_path / "loop.jinja").write_text(LOOPING)
    port = unused_port()
    with (
        server(tmp_path, "--port", str(port), "--chat-template", "loop.jinja") as (process, address),
        ThreadPoolExecutor(12) as threads,
    ):
        stream = post(address, max_tokens=200, stream=True)
        process.send_signal(signal.SIGHUP)
        assert stream.read().endswith(b"data: [DONE]\n\n")
        assert post(address, max_tokens=1).status == 200
        assert "SIGHUP: there is no bundle" in log_of(tmp_path)
        answers = [threads.submit(post, address, messages=[{"role": "user", "content": "loop"}]) for _ in range(12)]
        time.sleep(1)
        assert not any(answer.done() for answer in answers)
        with socket.create_connection(("127.0.0.1", port)):
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        assert {answer.result().status for answer in answers} == {503}
    with listen("127.0.0.1", port) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as a server does when it starts
        listener.listen()
