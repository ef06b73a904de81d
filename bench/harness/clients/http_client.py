"""One streamed request to an OpenAI server, with the times of its tokens; and a server in a process of its own."""

from __future__ import annotations

import http.client
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

import psutil

SERVE = [sys.executable, "-c", "from ssd_runtime.serving.http.cli import main; main()"]


@dataclass(slots=True)
class Reply:
    """The reply to a request; times are seconds since it was sent."""

    status: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    first: float | None = None
    last: float | None = None
    finish_reason: str | None = None
    error: dict[str, Any] | None = None
    usage: dict[str, Any] | None = None
    complete: bool = False
    """Whether the response ended as it should: a stream with [DONE], a refusal with an error object."""

    @property
    def tokens(self) -> int:
        """Number of new tokens, by the server's own count where it gives one."""
        return int(self.usage["completion_tokens"]) if self.usage else len(self.token_ids)


def ask(address: str, body: dict[str, Any] | bytes, key: str | None = None, leave_after: int = -1) -> Reply:
    """Send a chat request and read the answer; with `leave_after` the connection is closed after so many events."""
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=600)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    reply = Reply()
    began = perf_counter()
    try:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        connection.request("POST", "/v1/chat/completions", data, {"Content-Type": "application/json", **headers})
        if leave_after == 0:
            return reply
        response = connection.getresponse()
        reply.status = response.status
        if not (response.getheader("content-type") or "").startswith("text/event-stream"):
            _whole(reply, response.read())
            return reply
        events = 0
        for line in response:
            if not line.startswith(b"data: "):
                continue
            if line.startswith(b"data: [DONE]"):
                reply.complete = True
                continue
            _event(reply, json.loads(line[6:]), perf_counter() - began)
            events += 1
            if events == leave_after:
                return reply
    except (OSError, http.client.HTTPException) as error:
        reply.error = {"message": str(error), "type": type(error).__name__}
    finally:
        connection.close()
    return reply


def _whole(reply: Reply, content: bytes) -> None:
    """Read an answer that is no stream."""
    body = json.loads(content)
    reply.error = body.get("error")
    reply.complete = True
    reply.usage = body.get("usage")


def _event(reply: Reply, event: dict[str, Any], now: float) -> None:
    """Read one event of a stream."""
    reply.error = event.get("error", reply.error)
    reply.usage = event.get("usage") or reply.usage
    for choice in event.get("choices", []):
        text = choice.get("delta", {}).get("content") or ""
        tokens = choice.get("token_ids", [])
        if text or tokens:
            reply.first = now if reply.first is None else reply.first
            reply.last = now
        reply.text += text
        reply.token_ids += tokens
        reply.finish_reason = choice.get("finish_reason") or reply.finish_reason


@contextmanager
def server(*options: str) -> Iterator[tuple[str, psutil.Process]]:
    """Run `ssd-serve` with options on a free port; yields its address and process."""
    process = subprocess.Popen([*SERVE, "--port", "0", *options], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    lines = list[str]()
    try:
        for line in process.stderr:
            lines.append(line)
            if found := re.search(r"serving .* on (http://\S+)", line):
                break
        else:
            raise RuntimeError(f"the server did not start: {''.join(lines)}")
        # A pipe that nobody reads would stop the server once it is full.
        threading.Thread(target=process.stderr.read, daemon=True).start()
        yield found[1], psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait()
