"""Clients that dawdle or do not read: their connections end, and nobody else notices."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from threading import Thread
from urllib.parse import urlsplit

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ssd_runtime.serving.http.app import Service
from ssd_runtime.serving.http.transport.connections import BoundedProtocol
from tests.clients import HEAD, request
from tests.folders import TEXTS, save_tiny_model
from tests.serving import serving, tiny_engine, tiny_service
from tests.waiting import wait_until

SHORT = request(max_tokens=1)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Service:
    return tiny_service(tiny_engine(save_tiny_model(tmp_path_factory.mktemp("model"), context=4096)), places=64)


@pytest.fixture(scope="module")
def address(service: Service) -> Iterator[tuple[str, int]]:
    with serving(service) as url:
        host, port = urlsplit(url).netloc.split(":")
        yield host, int(port)


def test_a_client_that_reads_slowly_gets_a_large_answer_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that reads nothing does not."""
    monkeypatch.setattr("ssd_runtime.serving.http.transport.connections.SEND_SECONDS", 0.5)
    size = 6 << 20

    async def large(request: Request) -> Response:
        return Response(b"x" * size)

    app = Starlette(routes=[Route("/", large)])
    config = uvicorn.Config(app, port=0, log_level="error", http=BoundedProtocol, loop="asyncio", timeout_keep_alive=1)
    server = uvicorn.Server(config)
    thread = Thread(target=server.run)
    thread.start()
    wait_until(lambda: server.started, "the server starts")
    try:
        for reads in (True, False):
            with socket.socket() as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
                client.settimeout(20)
                client.connect(server.servers[0].sockets[0].getsockname())
                client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
                if not reads:
                    wait_until(lambda: server.server_state.connections, "the server has the connection")
                    wait_until(lambda: not server.server_state.connections, "the server ends it")
                got = 0
                while part := client.recv(1 << 20):
                    got += len(part)
                    time.sleep(0.06 if reads else 0)
                assert (got > size) == reads
    finally:
        server.should_exit = True
        thread.join()


def answered(address: tuple[str, int]) -> int:
    """The status of an ordinary request."""
    with socket.create_connection(address, timeout=60) as client:
        client.sendall(SHORT)
        response = http.client.HTTPResponse(client)
        response.begin()
        return response.status


def ended(client: socket.socket) -> bool:
    """Whether the server ends a connection within the client's time."""
    try:
        while client.recv(1 << 16):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


def test_a_head_has_to_come_in_time(address: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ssd_runtime.serving.http.transport.connections.HEAD_SECONDS", 1.0)
    with ExitStack() as open_clients:
        clients = [open_clients.enter_context(socket.create_connection(address, timeout=20)) for _ in range(4)]
        for client, begun in zip(clients, (b"", b"POST", SHORT[:60], SHORT + b"GET /health"), strict=True):
            client.sendall(begun)
        time.sleep(0.3)
        began = time.monotonic()
        assert all(ended(client) for client in clients)
        assert time.monotonic() - began < 10


def test_a_body_that_dawdles_after_its_answer_ends_the_connection(
    address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for it, and it keeps no connection open."""
    monkeypatch.setattr("ssd_runtime.serving.http.transport.connections.HEAD_SECONDS", 1.0)
    with socket.create_connection(address, timeout=20) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n")
        assert b"200" in client.recv(1000)
        client.sendall(b"x")
        assert ended(client)


def test_a_head_that_dawdles_has_no_more_time(address: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte of it begins no new time."""
    monkeypatch.setattr("ssd_runtime.serving.http.transport.connections.HEAD_SECONDS", 1.0)
    with socket.create_connection(address, timeout=60) as client, pytest.raises(ConnectionError):
        for _ in range(100):
            client.sendall(b"G")
            time.sleep(0.1)


def chunked(letters: int, size: int) -> bytes:
    """A request whose body, of a prompt of so many letters, comes in chunks of so many bytes."""
    body = json.dumps({"messages": [{"role": "user", "content": "x" * letters}], "max_tokens": 1}).encode()
    parts = [body[at : at + size] for at in range(0, len(body), size)]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
    return HEAD.encode() + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"


def test_a_body_in_tiny_chunks_is_refused(address: tuple[str, int]) -> None:
    """A short one is not, and those before it on the connection do not count."""
    for letters, size, expected in ((2000, 1, [400]), (2000, 5000, [200]), (700, 1, [200, 200])):
        with socket.create_connection(address, timeout=60) as client:
            for status in expected:
                client.sendall(chunked(letters, size))
                response = response_of(client)
                assert response.status == status
                response.read()


def begun(address: tuple[str, int], body: bytes, rest: int) -> socket.socket:
    """A connection that has sent a body but for `rest` bytes."""
    client = socket.create_connection(address, timeout=60)
    client.sendall(f"{HEAD}Content-Length: {len(body)}\r\n\r\n".encode() + body[: len(body) - rest])
    return client


def response_of(client: socket.socket) -> http.client.HTTPResponse:
    """The response on a connection, without its body."""
    response = http.client.HTTPResponse(client)
    response.begin()
    return response


def test_bodies_that_are_read_at_once_take_bounded_memory(
    service: Service, address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those beyond it are told to come again, and the others are answered."""
    bodies = 3
    size = service.settings.options.max_body_bytes
    monkeypatch.setattr("ssd_runtime.serving.http.transport.bodies.MOST_BODIES", bodies)
    fields = {"messages": [{"role": "user", "content": TEXTS[0]}], "max_tokens": 1}
    body = json.dumps(fields).encode().ljust(size)
    clients = [begun(address, body, 1) for _ in range(bodies)]
    wait_until(lambda: service.bodies.held == bodies * (size - 1), "the bodies have come")
    with begun(address, body, size - 100) as late:
        response = response_of(late)
        assert (response.status, response.headers["Retry-After"]) == (503, "1")
        assert json.loads(response.read())["error"]["code"] == "overloaded"
    for client in clients:
        with client:
            client.sendall(body[-1:])
            assert response_of(client).status == 200
    assert service.bodies.held == 0
    with begun(address, body, 0) as again:
        assert response_of(again).status == 200


def closed(client: socket.socket) -> bool:
    """Whether the server takes no more of what a client sends."""
    try:
        client.sendall(b"x")
    except ConnectionError:
        return True
    return False


def test_connections_beyond_the_limit_are_refused_until_others_end(
    address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ssd_runtime.serving.http.transport.connections.MOST_CONNECTIONS", 3)
    wait_until(lambda: answered(address) == 200, "there is room")
    clients = [socket.create_connection(address, timeout=60) for _ in range(3)]
    for sent in (b"", SHORT, request(head="x: " + "a" * 50_000 + "\r\n", max_tokens=1)):
        with socket.create_connection(address, timeout=60) as late:
            for begin in range(0, len(sent), 1000):  # the answer comes before all has been sent
                late.sendall(sent[begin : begin + 1000])
                time.sleep(0.001)
            response = response_of(late)
            assert (response.status, response.headers["Retry-After"]) == (503, "1")
            assert json.loads(response.read())["error"]["code"] == "overloaded"
            assert ended(late)
            wait_until(lambda: closed(late), "the server forgets it")
    monkeypatch.setattr("ssd_runtime.serving.http.transport.connections.REFUSAL_SECONDS", 60.0)
    monkeypatch.setattr("ssd_runtime.serving.http.transport.connections.MOST_REFUSED", 4)
    refused = [socket.create_connection(address, timeout=60) for _ in range(9)]
    assert all(response_of(each).status == 503 for each in refused)
    wait_until(lambda: sum(map(closed, refused)) == 5, "as many as may stay do")
    for client in clients:
        with client:
            client.sendall(SHORT)
            assert response_of(client).status == 200
    # Those who stay though they are refused take no place.
    wait_until(lambda: answered(address) == 200, "there is room")
    for each in refused:
        each.close()


def test_bytes_that_are_no_http_end_a_connection_whatever_was_answered(
    address: tuple[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    """Chunks without lengths, also after the answer has begun."""
    head = HEAD.replace("application/json", "text/plain") + "Transfer-Encoding: chunked\r\n\r\n"
    with socket.create_connection(address, timeout=20) as client:
        client.sendall(head.encode())
        assert b"415" in client.recv(1000)
        client.sendall(b"no length\r\n")
        assert ended(client)
    assert not [record for record in caplog.records if record.exc_info]
    assert answered(address) == 200
