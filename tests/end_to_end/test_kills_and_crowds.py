"""Crowds, kills and readers that never read: nothing leaks, and nothing is lost without an error."""

from __future__ import annotations

import http.client
import json
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest

from tests.clients import connected, leave_at_random, request
from tests.folders import TEXTS, save_tiny_model
from tests.ports import unused_port
from tests.served import defects, log_of, memory, metric, open_requests, send, server
from tests.waiting import wait_until

ROUNDS = 3
ROUND = {"whole": 24, "wrong": 6, "leaving": 14}
"""Requests of a round, by what becomes of them."""
AT_ONCE = 24
MEMORY = 768 << 20
"""Bytes that a server may take beyond those that it has once it has started."""
MOST_GROWTH = 12 << 20
"""Bytes by which memory varies from one round to the next."""
GRACE = 2.0


@dataclass(frozen=True)
class Question:
    """A request, and how it is asked."""

    path: str
    body: bytes

    def ask(self, address: str) -> tuple[int, str]:
        """The status, and the answer's text or the error's code. Raises what `http.client` does if it is broken."""
        response = send(address, self.path, self.body)
        body = response.read().decode()
        if response.getheader("content-type", "").startswith("text/event-stream"):
            events = [json.loads(line[6:]) for line in body.splitlines() if line.startswith("data: {")]
            assert body.endswith("data: [DONE]\n\n"), "a stream that http.client takes for complete is so"
        else:
            events = [json.loads(body)]
        if "error" in events[-1]:
            code = events[-1]["error"]["code"]
            return 503 if code == "shutting_down" else response.status, str(code)
        return response.status, "".join(said(choice) for event in events for choice in event["choices"])


def said(choice: dict[str, Any]) -> str:
    """The text of a choice or of a chunk of one, and why it ended."""
    part = choice.get("message") or choice.get("delta") or {"content": choice.get("text")}
    return f"{part.get('content') or ''}{choice['finish_reason'] or ''}"


def question(text: str, chat: bool = True, **fields: Any) -> Question:
    """A request for an answer to a text."""
    asked = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    return Question("/v1/chat/completions" if chat else "/v1/completions", json.dumps({**asked, **fields}).encode())


GOOD = [
    question(text, chat, stream=stream, max_tokens=16 + 8 * place, **sampling)
    for place, text in enumerate(TEXTS)
    for chat, stream, sampling in product([True, False], [True, False], [{"temperature": 0}, {"seed": place}])
]
WRONG = [
    question(TEXTS[0], temperature=9),
    question(TEXTS[0], chat=False, stream=True, max_tokens=-1),
    question(TEXTS[0] * 200, max_tokens=4),
    question(TEXTS[0], model="another"),
    Question("/v1/chat/completions", b'{"messages": ['),
]
LONG = {
    question(text, stream=place % 2 == 0, max_tokens=120 + 20 * place, temperature=0): text
    for place, text in enumerate(f"{TEXTS[place % 3]} {place}" for place in range(8))
}
"""Eight requests, all of which run at once, and their texts."""


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("room")
    save_tiny_model(folder / "model", context=2048)
    return folder


def files(process: psutil.Process) -> int:
    """Open files of a server, without the one for each process that renders its templates."""
    return int(process.num_fds() - len(process.children()))


def test_a_crowd_leaks_nothing_and_gets_what_lone_requests_get(room: Path) -> None:
    """Under a limit on memory: requests of all kinds, wrong ones, and clients that leave."""
    # torch and oneDNN keep code for every number of rows, which would look like a leak until they have seen all.
    caches = {"LRU_CACHE_CAPACITY": "4", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "8"}
    with server(room, "--kv-memory", "16M", strategy="auto", **caches) as (started, address):
        process = psutil.Process(started.pid)
        limit = memory(started.pid, "VmData") + MEMORY
        process.rlimit(psutil.RLIMIT_DATA, (limit, limit))
        expected = {each: each.ask(address) for each in (*GOOD, *WRONG)}
        assert {expected[each][0] for each in GOOD} == {200}
        assert {expected[each][0] for each in WRONG} == {400, 404}
        usual = files(process)

        def client(place: int, kind: str) -> str | None:
            """What went wrong for a client, if anything."""
            if kind == "leaving":
                return leave_at_random(address, Random(place))
            asked = Random(place).choice(GOOD if kind == "whole" else WRONG)
            found = asked.ask(address)
            return None if found == expected[asked] else f"{asked}: {found}, alone {expected[asked]}"

        taken = list[int]()
        for number in range(ROUNDS):
            kinds = [kind for kind, count in ROUND.items() for _ in range(count)]
            Random(number).shuffle(kinds)
            with ThreadPoolExecutor(AT_ONCE) as threads:
                wrong = list(threads.map(client, range(number * len(kinds), (number + 1) * len(kinds)), kinds))
            assert [each for each in wrong if each] == []
            wait_until(lambda: open_requests(address) == 0, "all requests have ended")
            taken.append(memory(started.pid, "VmRSS"))
        print(f"\nmemory after each round: {[each >> 10 for each in taken]} KiB, {usual} files")
        assert taken[-1] < taken[-2] + MOST_GROWTH
        wait_until(lambda: files(process) <= usual, f"the server has {usual} open files")
        assert metric(address, "ssd:kv_pool_used_bytes") == metric(address, "ssd:prefix_bytes")
        assert defects(address) == 0
        assert "Traceback" not in log_of(room)


@contextmanager
def asking(address: str) -> Iterator[dict[Question, Future[tuple[int, str] | None]]]:
    """Clients whose requests all run; the result of each is its answer, or None if its connection broke."""

    def ask(asked: Question) -> tuple[int, str] | None:
        try:
            return asked.ask(address)
        except (ConnectionError, http.client.HTTPException):
            return None

    with ThreadPoolExecutor(len(LONG)) as threads:
        clients = {each: threads.submit(ask, each) for each in LONG}
        wait_until(lambda: open_requests(address) == len(LONG), "all requests run")
        yield clients


def recorded(record: Path) -> list[str]:
    """The texts of a record, all of whose lines are whole."""
    *lines, end = record.read_bytes().decode().split("\n")
    assert end == ""
    return [json.loads(line)["messages"][0]["content"] for line in lines]


def test_a_killed_server_loses_nothing_without_an_error_and_serves_again_at_once(room: Path) -> None:
    """Its port and its record are free, and the record has a line for every request that was read, however it ends."""
    record = room / "record.jsonl"
    options = ("--port", str(unused_port()), "--record", str(record), "--grace", str(GRACE))
    with server(room, *options) as (process, address):
        with asking(address) as killed:
            helpers = psutil.Process(process.pid).children()
            process.kill()
        assert None in {client.result() for client in killed.values()}, "requests ran when it was killed"
        assert helpers
        wait_until(
            lambda: not any(each.is_running() and each.status() != "zombie" for each in helpers),
            "its helpers have ended",
        )
    with server(room, *options) as (process, address):
        assert sorted(recorded(record)) == sorted(LONG.values())
        right = {asked: asked.ask(address) for asked in LONG}
        with asking(address) as stopped:
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        assert None not in {client.result() for client in stopped.values()}
    assert sorted(recorded(record)) == sorted([*LONG.values()] * 3)
    for asked, client in (*killed.items(), *stopped.items()):
        assert client.result() in (None, (503, "shutting_down"), right[asked])


def test_readers_that_never_read_keep_no_place_and_do_not_keep_the_server(room: Path) -> None:
    with server(room, "--grace", str(GRACE), "--max-concurrency", "4") as (process, address):
        right = GOOD[0].ask(address)
        # Small segments make the server's buffers small, too: they would hold the whole of a long answer.
        readers = [connected(address, SO_RCVBUF=4096, TCP_MAXSEG=536) for _ in range(4)]
        for reader in readers:
            reader.sendall(request(max_tokens=400, stream=True, logprobs=True, top_logprobs=20))
        wait_until(lambda: open_requests(address) == len(readers), "all requests run")
        assert GOOD[0].ask(address) == right
        wait_until(lambda: open_requests(address) == 0, "all requests have ended")
        process.terminate()
        assert process.wait(30) == 0
    for reader in readers:
        with reader, reader.makefile("rb") as received:
            told = received.read()
            assert not told.endswith(b"\r\n0\r\n\r\n"), "a stream that was broken does not look whole"
