"""Clients of a server as they are on its socket: some leave, and some never read."""

from __future__ import annotations

import json
import socket
import struct
import time
from random import Random
from typing import Any

from tests.folders import TEXTS

HEAD = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def request(head: str = "", **fields: Any) -> bytes:
    """A request as it goes over the wire, with more lines in its head."""
    body = json.dumps({"messages": [{"role": "user", "content": TEXTS[0]}], **fields}).encode()
    return f"{HEAD}{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def connected(address: str, **options: int) -> socket.socket:
    """A connected socket with options by their names, such as SO_RCVBUF or TCP_MAXSEG."""
    host, port = address.split(":")
    client = socket.socket()
    client.settimeout(60)
    for name, value in options.items():
        level = socket.IPPROTO_TCP if name.startswith("TCP_") else socket.SOL_SOCKET
        client.setsockopt(level, getattr(socket, name), value)
    client.connect((host, int(port)))
    return client


def leave_at_random(address: str, random: Random) -> None:
    """Send a request, a part of one or two, perhaps read a part of the answer, and close or break the connection."""
    whole = request(max_tokens=random.choice([1, 50, 400]), stream=random.random() < 0.5)
    sent = random.choice([whole[: random.randrange(1, len(whole))], whole, whole + whole])
    with connected(address) as client:
        if random.random() < 0.5:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.sendall(sent)
        time.sleep(random.choice([0.0, 0.001, 0.02, 0.2]) * random.random())
        if len(sent) >= len(whole) and random.random() < 0.3:
            client.recv(random.choice([1, 100, 3000]))
