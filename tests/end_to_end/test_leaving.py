"""Clients that leave whenever they like, and a server that leaves whatever its clients do."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from tests.clients import connected, leave_at_random, request
from tests.folders import save_tiny_model
from tests.served import defects, log_of, post, served

GRACE = 1.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), context=4096)


def test_clients_that_leave_are_no_defect(folder: Path) -> None:
    """Nothing is logged of them, they count as cancelled at most, and their places are free again."""
    with served(folder) as (process, address):

        def leave(seed: int) -> None:
            random = Random(seed)
            for _ in range(30):
                leave_at_random(address, random)

        leaving = [threading.Thread(target=leave, args=(seed,)) for seed in range(10)]
        for thread in leaving:
            thread.start()
        for thread in leaving:
            thread.join()
        assert post(address, max_tokens=2).status == 200
        assert defects(address) == 0
        process.terminate()
        assert process.wait(60) == 0
    told = log_of(folder).partition(":serving ")[2].splitlines()
    assert [line for line in told[1:] if ":stopping: " not in line] == []


def stubborn(address: str) -> Iterator[socket.socket]:
    """Clients that neither send nor read what they should."""
    whole = request(max_tokens=4000, stream=True, logprobs=True, top_logprobs=20)
    for _ in range(3):
        reader = connected(address, SO_RCVBUF=4096)
        reader.sendall(whole)
        yield reader
    for size in (0, 1, 60, len(whole) - 1):
        sender = connected(address)
        sender.sendall(whole[:size])
        yield sender


def test_the_server_stops_whatever_clients_do(folder: Path) -> None:
    with served(folder, GRACE) as (process, address):
        clients = list(stubborn(address))
        assert post(address, max_tokens=2).status == 200
        time.sleep(5)
        began = time.monotonic()
        process.terminate()
        assert process.wait(60) == 0
        # An idle server of a busy machine needs two seconds.
        assert time.monotonic() - began < GRACE + 8
        assert "Traceback" not in log_of(folder)
        for client in clients:
            client.close()
