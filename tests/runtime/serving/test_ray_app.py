"""Replicas on a real Ray Serve, one of which is killed under load."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from ssd_runtime.engine.engine import Engine
from ssd_runtime.serving.http.openai.errors import ApiError
from ssd_runtime.serving.ray_app.call import Call, ReplicaLost
from tests.folders import TEXTS
from tests.ports import unused_port
from tests.serving import lone, request_for, tiny_engine

pytest.importorskip("ray", reason="needs the extra `ray`")
TOKENS = 240
PAGE = "https://chat.example"


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    from ray import serve

    from ssd_runtime.engine.opening import LoadSettings
    from ssd_runtime.serving.http.settings import ServiceOptions
    from ssd_runtime.serving.ray_app.application import QUIET, application
    from ssd_runtime.serving.ray_app.ray_cluster import ray_cluster
    from ssd_runtime.serving.ray_app.scale import Scale

    port = unused_port()
    options = ServiceOptions(
        model=str(folder),
        name="tiny",
        strategy="plain",
        temperature=0.0,
        load=LoadSettings(device="cpu", threads=1),
        allowed_origins=(PAGE,),
    )
    with ray_cluster("local"):
        serve.start(http_options={"host": "127.0.0.1", "port": port}, logging_config=QUIET)
        serve.run(application(options, Scale.of("2", 1, grace=2.0)), name="ssd", logging_config=QUIET)
        yield f"http://127.0.0.1:{port}"
        serve.shutdown()


def test_web_pages_of_an_allowed_origin_can_read_every_answer(address: str) -> None:
    for path in ("/v1/models", "/health"):
        response = httpx2.get(f"{address}{path}", headers={"Origin": PAGE}, timeout=60)
        assert response.headers.get_list("access-control-allow-origin") == [PAGE]


def test_a_replica_runs_on_the_card_that_ray_gives_it() -> None:
    from ssd_runtime.engine.opening import LoadSettings
    from ssd_runtime.serving.http.settings import ServiceOptions
    from ssd_runtime.serving.ray_app.application import of_replica

    for device, own in (("cuda:1", "cuda"), ("cuda", "cuda"), ("cpu", "cpu"), (None, None)):
        assert of_replica(ServiceOptions(load=LoadSettings(device=device))).load.device == own


def replicas() -> list[psutil.Process]:
    """The processes of the replicas."""
    return [each for each in psutil.Process().children(recursive=True) if "ServeReplica:ssd:replica" in name_of(each)]


def name_of(process: psutil.Process) -> str:
    """The name of a process; empty if it has ended meanwhile."""
    try:
        return process.name()
    except psutil.Error:
        return ""


class Asked:
    """One streamed chat in a thread of its own."""

    def __init__(self, address: str, messages: list[dict[str, str]], **fields: Any) -> None:
        self.events: list[Any] = []
        self._address = address
        self._body = {"messages": messages, "stream": True, "max_tokens": TOKENS, "return_token_ids": True, **fields}
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        url = f"{self._address}/v1/chat/completions"
        with httpx2.stream("POST", url, json=self._body, timeout=300) as response:
            for line in response.iter_lines():
                if line:
                    self.events.append(json.loads(line[6:]) if line[6:] != "[DONE]" else None)

    @property
    def tokens(self) -> list[int]:
        """The tokens so far."""
        choices = [choice for event in self.events if event for choice in event["choices"]]
        return [token for choice in choices for token in choice.get("token_ids", [])]

    def wait(self) -> None:
        self._thread.join(300)
        assert self.events[-1] is None, "the stream is complete"


def test_a_conversation_finds_its_prefix_where_its_first_turn_was(address: str) -> None:
    for number in range(4):
        messages = [{"role": "user", "content": f"{number} {' '.join(TEXTS)}"}]
        first = whole(address, messages)
        answer = first["choices"][0]["message"]["content"]
        following = [{"role": "assistant", "content": answer}, {"role": "user", "content": "And then?"}]
        second = whole(address, messages + following)
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 50


def whole(address: str, messages: list[dict[str, str]]) -> Any:
    """A short answer at once."""
    body = {"messages": messages, "max_tokens": 4}
    response = httpx2.post(f"{address}/v1/chat/completions", json=body, timeout=60)
    assert response.status_code == 200
    return response.json()


def test_no_request_is_lost_when_a_replica_is_killed(address: str, folder: Path) -> None:
    """Streams go on elsewhere and are those of plain decoding alone; those of the other replica are left alone."""
    engine = tiny_engine(folder)
    # Where the machine is slow to look, the answers may have ended before the kill: then more are asked for.
    for attempt in range(5):
        kill_under_load(address, engine, [f"{attempt}.{number} {TEXTS[0]}" for number in range(6)])
        metrics = httpx2.get(f"{address}/metrics", timeout=60).text
        assert "ssd:router_streams_broken_total 0.0" in metrics
        resumed = next(line for line in metrics.splitlines() if line.startswith("ssd:router_streams_resumed_total"))
        if float(resumed.split()[-1]) >= 1:
            return
    raise AssertionError("no stream was resumed")


def kill_under_load(address: str, engine: Engine, texts: Sequence[str]) -> None:
    """Ask for one stream a text, kill the replica that works most, and compare every answer with its lone decode."""
    seeds = [None, 1, 2, 3, None, 5]
    expected = [
        lone(engine, request_for(engine, text, TOKENS, seed=seed)) for text, seed in zip(texts, seeds, strict=True)
    ]
    before = two_replicas()
    idle = {each.pid: seconds_of(each) for each in before}
    asked = [
        Asked(
            address,
            [{"role": "user", "content": text}],
            **({} if seed is None else {"seed": seed, "temperature": 0.9}),
        )
        for text, seed in zip(texts, seeds, strict=True)
    ]
    deadline = time.monotonic() + 60
    while not any(len(each.tokens) > 20 for each in asked) and time.monotonic() < deadline:
        time.sleep(0.01)
    # By chance all conversations may be one replica's.
    busiest = max(before, key=lambda each: seconds_of(each) - idle[each.pid])
    os.kill(busiest.pid, signal.SIGKILL)
    for each in asked:
        each.wait()
    assert [each.tokens for each in asked] == expected


def two_replicas() -> list[psutil.Process]:
    """The processes of both replicas, once both serve."""
    from ray import serve

    deadline = time.monotonic() + 120
    while len(there := replicas()) != 2 or serve.status().applications["ssd"].status != "RUNNING":
        assert time.monotonic() < deadline, "a replica that died is replaced"
        time.sleep(0.1)
    return there


def seconds_of(process: psutil.Process) -> float:
    """The processor time that a process has had."""
    times = process.cpu_times()
    return float(times.user + times.system)


class Handle:
    """Ray Serve's handle of replicas that are not to be had: the answer to a request is an error."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def options(self, **_: object) -> Handle:
        return self

    def remote(self, call: object) -> Handle:
        return self

    def broadcast(self, method: str) -> Handle:
        return self

    async def results_async(self, **_: object) -> list[Any]:
        raise TimeoutError

    async def __aiter__(self) -> AsyncIterator[Any]:
        raise self._error
        yield

    def cancel(self) -> None:
        raise self._error


def respond(error: Exception) -> None:
    """Raise what a router is told where Ray Serve raises `error`."""
    from ssd_runtime.serving.ray_app.handle import ServedReplicas

    async def asked() -> None:
        replicas = ServedReplicas(Handle(error))  # type: ignore[arg-type]
        async for _ in replicas.respond(Call(method="POST", path="/v1/completions", headers=(), body=b"")):
            pass

    asyncio.run(asked())


def test_a_replica_is_lost_however_it_goes_but_not_by_an_error_of_its_own() -> None:
    from ray import exceptions

    for error in (exceptions.ActorDiedError(), exceptions.WorkerCrashedError(), exceptions.LocalRayletDiedError()):
        with pytest.raises(ReplicaLost):
            respond(error)
    with pytest.raises(exceptions.RayTaskError):
        respond(exceptions.RayTaskError("respond", "a traceback", ValueError("a defect")))


def test_a_full_queue_is_told_as_one_server_tells_it_and_health_stays() -> None:
    from ray.serve.exceptions import BackPressureError

    from ssd_runtime.serving.ray_app.handle import ServedReplicas

    full = BackPressureError(num_queued_requests=1, max_queued_requests=1)
    with pytest.raises(ApiError) as told:
        respond(full)
    assert told.value.status == 429
    replicas = ServedReplicas(Handle(full))  # type: ignore[arg-type]
    assert asyncio.run(replicas.alive())
    replicas._metrics = [("one", "latest")]
    assert asyncio.run(replicas.metrics()) == [("one", "latest")]
