"""A short request beside one that does its worst waits no longer than is stated, whatever that one's parameters."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest

from ssd_runtime.planning.registry import SETTINGS, STRATEGIES
from tests.folders import save_tiny_model
from tests.served import open_requests, post, server
from tests.waiting import wait_until

LONGEST_WAIT = 5.0
"""Seconds for four tokens of the tiny model; on a quiet machine they take 0.1 s."""
STUDIED = tuple(
    each.name
    for each in STRATEGIES
    if not (each.offered or each.needs_bundle or each.needs_light or each.name == "mtp")
)
WORST = {
    "max_draft": 64,
    "width": 64,
    "confidence": 0,
    "threshold": 0,
    "refresh": 1,
    "states": 0,
    "share": 1,
    "every": 1,
}
"""Parameters that make drafts long and searches frequent and dear, where a strategy has them."""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    room = tmp_path_factory.mktemp("room")
    save_tiny_model(room / "model", weak=12, context=2048)
    with server(room, "--allow-strategies", ",".join(STUDIED), strategy="auto") as (_, address):
        yield address


def attacks(strategy: str) -> Iterator[dict[str, Any]]:
    """The parameters that do their worst, beside all others at the lower and at the upper ends."""
    known = {each.name: each.metadata["bounds"] for each in fields(SETTINGS[strategy]) if "bounds" in each.metadata}
    worst = {name: min(value, known[name][-1]) for name, value in WORST.items() if name in known}
    for end in (0, -1):
        yield {name: bounds[end] for name, bounds in known.items()} | worst


@pytest.mark.parametrize("strategy", ["auto", "lookup", *STUDIED])
def test_the_worst_wait_of_a_short_request(address: str, strategy: str) -> None:
    waits = list[float]()
    for parameters in attacks(strategy):
        attack = post(address, max_tokens=1900, stream=True, ssd={"strategy": strategy, "parameters": parameters})
        assert attack.status == 200, attack.read()
        attack.readline()  # it decodes now
        began = time.monotonic()
        answer = json.load(post(address, max_tokens=4, ssd={"strategy": "plain"}))
        waits.append(time.monotonic() - began)
        attack.close()
        assert answer["usage"]["completion_tokens"] == 4
        wait_until(lambda: not open_requests(address), "both requests have ended")
    assert max(waits) < LONGEST_WAIT
