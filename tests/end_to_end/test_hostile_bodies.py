"""No body of a request is felt by others, takes much memory or is a server's error."""

from __future__ import annotations

import os
import time
from pathlib import Path

from tests.folders import save_tiny_model
from tests.hostile_bodies import hostile_bodies
from tests.served import Bystander, memory, reset_peak, send, served

BODIES = int(os.environ.get("SSD_HOSTILE_BODIES", "90"))
MOST_DELAY = 0.25
"""Seconds for which others may wait longer than usual."""
MOST_MEMORY = 8
"""Bytes of memory per byte of a body."""
ANYWAY = 16 << 20
"""Bytes that the memory of a process varies by without any large body: the answer, the allocator's pools."""
TRIES = 3
"""A body that delays others does so whenever it is sent; another process of this machine does not."""


def test_no_body_is_felt_by_others(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, context=8192)
    with served(tmp_path) as (process, address), Bystander(address) as others:
        begin = time.monotonic()
        time.sleep(3)
        others.settle()
        usual = others.worst(begin, time.monotonic())
        figures = dict.fromkeys([*usual, "request", "memory"], (0.0, ""))
        wrong = list[str]()
        for title, path, body in hostile_bodies(BODIES):
            for _ in range(TRIES):
                before = memory(process.pid, "VmRSS")
                reset_peak(process.pid)
                begin = time.monotonic()
                status = send(address, path, body).status
                end = time.monotonic()
                others.settle()
                waits = others.worst(begin, end)
                taken = memory(process.pid, "VmHWM") - before
                felt = [who for who, wait in waits.items() if wait > usual[who] + MOST_DELAY]
                large = taken > MOST_MEMORY * len(body) + ANYWAY
                if status < 500 and not felt and not large:
                    break
            else:
                wrong.append(f"{title} ({len(body)} bytes): {status}, {waits}, {taken >> 20} MiB")
            for name, value in {**waits, "request": end - begin, "memory": max(0, taken - ANYWAY) / len(body)}.items():
                figures[name] = max(figures[name], (value, title))
        print(f"\n{BODIES} bodies, usual waits {usual}, worst: {figures}")
        assert not wrong, "\n".join(wrong)
        assert process.poll() is None
