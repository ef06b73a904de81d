"""Threads that share an engine, and Ctrl-C at any moment: every answer is plain decoding's, and no memory is lost."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Any

import pytest

from ssd_profiles.errors import UserError
from ssd_runtime import Engine, RunSettings
from ssd_runtime.engine.interrupts import uninterrupted
from ssd_runtime.engine.observed import Observation
from ssd_runtime.engine.turn import Request
from ssd_runtime.model.cache.slot_ranges import SlotRanges
from tests.folders import TEXTS
from tests.serving import tiny_engine

THREADS = 8
REQUESTS = int(os.environ.get("SSD_REQUESTS", "12"))
INTERRUPTIONS = int(os.environ.get("SSD_KILLS", "10"))
STRATEGIES = ("auto", "lookup", "clasp", "swift", "plain")
LENGTHS = (1, 3, 6)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return tiny_engine(folder, THREADS)


@pytest.fixture
def alarm() -> Iterator[Callable[[float], None]]:
    """Press Ctrl-C after so many seconds; 0 for never."""
    before = signal.signal(signal.SIGALRM, lambda number, frame: signal.raise_signal(signal.SIGINT))
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds) and None
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
    signal.signal(signal.SIGINT, usual)


def tokens(engine: Engine, texts: list[str], strategy: str, length: int) -> list[list[int]]:
    outcomes = engine.generate(texts, RunSettings(strategy, max_new_tokens=length))
    return [outcome.generation.token_ids for outcome in outcomes]


def held(engine: Engine) -> int:
    """Bytes of keys and values that belong to no prefix, while nothing is decoded."""
    return engine.scheduler.pool.used_bytes - engine.scheduler.prefixes.bytes


def test_threads_share_an_engine(engine: Engine) -> None:
    expected = {(text, length): tokens(engine, [text], "plain", length) for text in TEXTS for length in LENGTHS}

    def ask(number: int) -> int:
        """Ask for one answer after another; returns how many were right."""
        random = Random(number)
        right = 0
        for _ in range(REQUESTS):
            text, length = random.choice(TEXTS), random.choice(LENGTHS)
            right += tokens(engine, [text], random.choice(STRATEGIES), length) == expected[text, length]
        return right

    with ThreadPoolExecutor(THREADS) as pool:
        assert list(pool.map(ask, range(THREADS))) == [REQUESTS] * THREADS
    assert held(engine) == 0


@pytest.mark.parametrize("strategy", ["lookup", "clasp"])
def test_ctrl_c_at_any_moment_leaves_the_engine_whole(
    engine: Engine, strategy: str, alarm: Callable[[float], None]
) -> None:
    plain = tokens(engine, TEXTS, "plain", 32)
    random = Random(INTERRUPTIONS)
    outcomes = Counter[str]()
    for _ in range(INTERRUPTIONS):
        began = perf_counter()
        assert tokens(engine, TEXTS, strategy, 32) == plain
        try:
            alarm(random.uniform(1e-4, perf_counter() - began))
            tokens(engine, TEXTS, strategy, 32)
            alarm(0)
            outcomes["ended"] += 1
        except KeyboardInterrupt:
            outcomes["interrupted"] += 1
        assert engine.scheduler.running == engine.scheduler.waiting == held(engine) == 0
    assert outcomes["interrupted"] > INTERRUPTIONS // 4, outcomes
    assert tokens(engine, TEXTS, strategy, 32) == plain


def test_every_cycle_is_reported_before_its_tokens(engine: Engine) -> None:
    calls = list[Observation | list[int]]()
    settings = RunSettings("lookup", max_new_tokens=24)
    request = engine.add_request(TEXTS[0], settings, on_tokens=calls.append, on_cycle=calls.append)
    while not request.done:
        engine.step()
    generation = request.outcome().generation
    reported, tokens = calls[1::2], calls[::2]
    assert [each.cycle for each in reported if isinstance(each, Observation)] == generation.cycles
    assert tokens == [generation.token_ids[:1], *(cycle.tokens for cycle in generation.cycles)]


@pytest.mark.parametrize(("own", "after"), [(False, 5), (True, 5), (True, 40)])
@pytest.mark.parametrize("strategy", ["auto", "lookup", "plain"])
def test_a_callback_cancels_a_request(engine: Engine, strategy: str, own: bool, after: int) -> None:
    """Another in the middle of a step, or its own, also with its last tokens; later prompts decode as before."""
    settings = RunSettings(strategy, max_new_tokens=40)
    texts = [f"{text} {text}" for text in TEXTS[:2]]
    plain = tokens(engine, texts, "plain", 40)
    seen, requests = list[int](), list[Request]()

    def stop_one(ids: list[int]) -> None:
        seen.extend(ids)
        if len(seen) >= after:
            engine.cancel(requests[0 if own else 1])

    requests += [engine.add_request(texts[0], settings, on_tokens=stop_one), engine.add_request(texts[1], settings)]
    while not all(request.done for request in requests):
        engine.step()
    cancelled, other = requests if own else reversed(requests)
    assert cancelled.job.result is None
    assert cancelled.job.error is None
    assert other.outcome().generation.token_ids == plain[own]
    assert engine.scheduler.running == engine.scheduler.waiting == held(engine) == 0
    assert tokens(engine, texts, strategy, 40) == plain


def test_a_callback_that_steps_fails_its_own_request_alone(engine: Engine) -> None:
    plain = tokens(engine, TEXTS[:1], "plain", 12)

    def ask_again(_: str) -> None:
        engine.generate(TEXTS[:1])

    settings = RunSettings("plain", max_new_tokens=12)
    nested, other = engine.add_request(TEXTS[1], settings, ask_again), engine.add_request(TEXTS[0], settings)
    while not (nested.done and other.done):
        engine.step()
    with pytest.raises(UserError, match="a step is running"):
        nested.outcome()
    assert [other.outcome().generation.token_ids] == plain == tokens(engine, TEXTS[:1], "plain", 12)


@pytest.mark.parametrize("within", ["take", "extend", "give_back"])
def test_ctrl_c_while_memory_changes_hands_loses_none(
    engine: Engine, within: str, alarm: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = tokens(engine, TEXTS, "plain", 12)
    usual = getattr(SlotRanges, within)
    pressed = list[bool]()

    def interrupted(*given: Any) -> Any:
        result = usual(*given)
        if not pressed:
            pressed.append(True)
            signal.raise_signal(signal.SIGINT)
        return result

    monkeypatch.setattr(SlotRanges, within, interrupted)
    with pytest.raises(KeyboardInterrupt):
        tokens(engine, TEXTS, "lookup", 200)
    assert pressed
    assert engine.scheduler.running == engine.scheduler.waiting == held(engine) == 0
    assert tokens(engine, TEXTS, "lookup", 12) == plain


def test_a_request_that_ended_in_an_interrupted_step_is_returned_by_the_next(
    engine: Engine, alarm: Callable[[float], None]
) -> None:
    settings = RunSettings("plain", max_new_tokens=1)
    request = engine.add_request(TEXTS[0], settings, on_tokens=lambda _: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        while True:
            assert engine.step() == []
    assert request.done
    assert engine.step() == [request]


def test_ctrl_c_waits_for_the_end_of_the_block_and_a_second_one_does_not(alarm: Callable[[float], None]) -> None:
    done = list[str]()
    with pytest.raises(KeyboardInterrupt), uninterrupted(), uninterrupted():
        signal.raise_signal(signal.SIGINT)
        done.append("after one")
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        done.append("after two")
    assert done == ["after one"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
