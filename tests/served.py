"""Servers in processes of their own, and what others notice of one while it is busy."""

from __future__ import annotations

import http.client
import json
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from ssd_runtime.serving.http.listening import listen
from ssd_runtime.serving.http.server import serve
from tests.commands import SERVE, begin
from tests.folders import TEXTS
from tests.serving import tiny_engine, tiny_service
from tests.waiting import wait_until


def main() -> None:
    """Serve the tiny model of this folder until SIGTERM; nothing is measured before."""
    logging.basicConfig(stream=sys.stderr)
    logging.getLogger("ssd_serve").setLevel(logging.INFO)
    service = tiny_service(tiny_engine(Path()), places=72)
    service.thread.start()
    serve(service, listen("127.0.0.1", 0), 25.0)


class Forked:
    """A command's process that was forked from one which has done the imports, to be used as others are."""

    def __init__(self, process: BaseProcess) -> None:
        self._process = process
        self.pid = process.pid or 0
        self.kill, self.terminate = process.kill, process.terminate

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        return self._process.exitcode

    def wait(self, seconds: float | None = None) -> int | None:
        """The exit code; None if it still runs after so many seconds."""
        self._process.join(seconds)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


Served = tuple[Forked, str]
"""The process of a server, and its address."""


@contextmanager
def server(folder: Path, *options: str, strategy: str = "plain", **variables: str) -> Iterator[Served]:
    """`ssd-serve` of the folder `model` in a folder; `variables` are added to its environment."""
    given = ["--model", "model", "--port", "0", "--strategy", strategy, *options]
    with served(folder, SERVE, *given, **variables) as found:
        yield found


@contextmanager
def served(folder: Path, module: str = __name__, *options: str, **variables: str) -> Iterator[Served]:
    """A process that serves what is in a folder by the command of a module; it is stopped if the test has not.

    What it logs is in `log_of(folder)`.
    """
    log = folder / "log.txt"
    log.write_text("")  # an earlier server of this folder has told its address
    streams = [Path(os.devnull), Path(os.devnull), log]
    process = Forked(begin(folder, module, *options, streams=streams, **variables))
    try:
        wait_until(lambda: _address(folder) or process.poll() is not None, "the server serves", seconds=300)
        found = _address(folder)
        assert found is not None, log_of(folder)
        yield process, found[1]
    finally:
        process.kill()
        process.wait()


def _address(folder: Path) -> re.Match[str] | None:
    return re.search(r"serving .* on http://(\S+) ", log_of(folder))


def log_of(folder: Path) -> str:
    """The log of the last process that served a folder."""
    return (folder / "log.txt").read_text()


def open_requests(address: str) -> float:
    """Requests that the server decodes or that wait."""
    return sum(metric(address, f"vllm:num_requests_{state}") for state in ("running", "waiting"))


def defects(address: str) -> float:
    """Requests that a server failed by itself."""
    return metric(address, "ssd:requests_without_answer_total", 'why="(?:failed|http 5..)"')


def metric(address: str, name: str, labels: str = "") -> float:
    """The sum of a metric of a server, over all labels or those that match."""
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=60)
    connection.request("GET", "/metrics")
    told = connection.getresponse().read().decode()
    return sum(float(found) for found in re.findall(rf"(?m)^{name}(?:\{{.*{labels}.*\}})? (\S+)$", told))


def post(address: str, **fields: Any) -> http.client.HTTPResponse:
    body = {"messages": [{"role": "user", "content": TEXTS[0]}], "temperature": 0, **fields}
    return send(address, "/v1/chat/completions", json.dumps(body).encode())


def send(address: str, path: str, body: bytes, timeout: float = 600, **headers: str) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection(address, timeout=timeout)
    connection.request("POST", path, body, {"Content-Type": "application/json", **headers})
    return connection.getresponse()


def memory(process: int, kind: str) -> int:
    """Bytes of memory of a process: `VmRSS` at present, or `VmHWM`, the most since `reset_peak`."""
    found = re.search(rf"(?m)^{kind}:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text())
    return int(found[1]) << 10


def reset_peak(process: int) -> None:
    """Begin `VmHWM` of a process anew."""
    Path(f"/proc/{process}/clear_refs").write_text("5")


class Bystander:
    """Others than the one who keeps a server busy: one asks for its health all the time, and one reads a stream."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._done = threading.Event()
        self._waits: dict[str, list[tuple[float, float]]] = {"health": [], "stream": []}
        """Begin and end of every wait, by who waited."""
        self._threads = [threading.Thread(target=each) for each in (self._ask, self._read)]

    def __enter__(self) -> Bystander:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        for thread in self._threads:
            thread.join()

    def worst(self, begin: float, end: float) -> dict[str, float]:
        """The longest waits, in seconds, that touched the time from `begin` to `end`, by who waited."""
        return {
            who: max((until - since for since, until in list(waits) if until >= begin and since <= end), default=0.0)
            for who, waits in self._waits.items()
        }

    def settle(self) -> None:
        """Return when every wait that has begun is over."""
        now = time.monotonic()
        while any(not waits or waits[-1][0] < now for waits in self._waits.values()):
            assert all(thread.is_alive() for thread in self._threads), "others are answered"
            time.sleep(0.005)

    def _ask(self) -> None:
        connection = http.client.HTTPConnection(self._address, timeout=600)
        while not self._done.wait(0.01):
            since = time.monotonic()
            connection.request("GET", "/health")
            assert connection.getresponse().read() == b'{"status":"ok"}'
            self._waits["health"].append((since, time.monotonic()))

    def _read(self) -> None:
        while not self._done.is_set():
            with post(self._address, stream=True) as response:
                since = None
                while not self._done.is_set() and response.readline():
                    now = time.monotonic()
                    if since is not None:
                        self._waits["stream"].append((since, now))
                    since = now
