"""Whatever happens, every request ends once, and nobody feels the others' failures."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ssd_runtime.engine.engine import Engine
from ssd_runtime.planning.papers.clasp import ClaspPlanner
from ssd_runtime.serving.http.engine_thread import FIRST_GUESS, Closing, EngineThread, QueueFull
from ssd_runtime.serving.http.metrics import Metrics
from ssd_runtime.serving.http.pending import Block, End
from tests.folders import TEXTS
from tests.serving import Inbox, assert_ended_once, request_for, running, tiny_engine
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return tiny_engine(folder)


@pytest.fixture
def thread(engine: Engine) -> Iterator[EngineThread]:
    with running(engine) as thread:
        yield thread


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    plan=st.lists(
        st.tuples(st.integers(1, 20), st.sampled_from(["auto", "plain"]), st.none() | st.integers(0, 4)),
        min_size=1,
        max_size=8,
    )
)
def test_every_order_ends_once_whenever_it_is_cancelled(
    engine: Engine, plan: list[tuple[int, str, int | None]]
) -> None:
    """Cancelled after so many blocks, before the first one included; the others are complete, and memory comes back."""
    inbox = Inbox()
    with running(engine) as thread:

        def listen(place: int, event: Block | End) -> None:
            inbox.listen(place, event)
            if plan[place][2] == len(inbox.events[place]):
                thread.cancel([pending[place]])

        requests = [request_for(engine, TEXTS[place % 3], tokens, name) for place, (tokens, name, _) in enumerate(plan)]
        with engine._lock:  # it takes no step before the first of them are cancelled
            pending = thread.submit(requests, listen)
            for place, (_, _, after) in enumerate(plan):
                if after == 0:
                    thread.cancel([pending[place]])
        ends = inbox.wait(len(requests))
        assert thread.open == 0
    assert_ended_once(inbox, len(requests))
    for place, (tokens, _, after) in enumerate(plan):
        if after is None:
            outcome = ends[place].outcome
            assert len(outcome.generation.token_ids) == tokens
        elif after == 0:
            assert inbox.events[place] == [End(cancelled=True)]
        assert ends[place].outcome is not None or ends[place].cancelled
    assert engine.scheduler.pool.used_bytes == engine.scheduler.prefixes.bytes
    assert engine.scheduler.running == engine.scheduler.waiting == 0


def test_whoever_wants_the_whole_answer_is_told_its_end_alone(engine: Engine, thread: EngineThread) -> None:
    inbox = Inbox()
    thread.submit([request_for(engine, TEXTS[0], in_blocks=each) for each in (True, False)], inbox.listen)
    ends = inbox.wait(2)
    assert len(inbox.events[0]) > 2
    assert inbox.events[1] == [ends[1]]
    assert ends[1].outcome.text == ends[0].outcome.text


def test_a_defect_in_one_order_leaves_the_others_alone(
    engine: Engine, thread: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: ClaspPlanner, context: int) -> Any:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(ClaspPlanner, "plan", fail)
    requests = [
        request_for(engine, TEXTS[0], 12, "plain"),
        request_for(engine, TEXTS[1], 12, "clasp"),
        request_for(engine, TEXTS[2]),
    ]
    inbox = Inbox()
    thread.submit(requests, inbox.listen)
    ends = inbox.wait(3)
    assert_ended_once(inbox, 3)
    assert isinstance(ends[1].error, ZeroDivisionError)
    for place in (0, 2):
        outcome = ends[place].outcome
        assert len(outcome.generation.token_ids) == 12


def test_a_failed_step_ends_the_open_orders_and_not_the_thread(
    engine: Engine, thread: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> Any:
        raise RuntimeError("planted")

    inbox, later = Inbox(), Inbox()
    with monkeypatch.context() as patched:
        patched.setattr(engine, "step", fail)
        thread.submit([request_for(engine, TEXTS[0]), request_for(engine, TEXTS[1])], inbox.listen)
        assert all(isinstance(end.error, RuntimeError) for end in inbox.wait(2).values())
    thread.submit([request_for(engine, TEXTS[0])], later.listen)
    assert later.wait(1)[0].outcome is not None
    assert_ended_once(inbox, 2)


def test_an_order_whose_listener_fails_is_cancelled(engine: Engine, thread: EngineThread) -> None:
    seen = list[Block | End]()

    def gone(place: int, event: Block | End) -> None:
        seen.append(event)
        raise RuntimeError("the event loop is closed")

    inbox = Inbox()
    thread.submit([request_for(engine, TEXTS[0], 200)], gone)
    thread.submit([request_for(engine, TEXTS[1], 30)], inbox.listen)
    assert inbox.wait(1)[0].outcome is not None
    wait_until(lambda: not thread.open, "all requests have ended")
    assert [event.cancelled for event in seen if isinstance(event, End)] == [True]


def test_more_orders_than_places_are_refused_together(engine: Engine) -> None:
    inbox = Inbox()
    with running(engine, places=3) as thread:
        pending = thread.submit([request_for(engine, TEXTS[0], 300)] * 2, inbox.listen)
        with pytest.raises(QueueFull) as refused:
            thread.submit([request_for(engine, TEXTS[1])] * 2, inbox.listen)
        assert 1 <= refused.value.retry_after <= 60
        assert thread.open == 2
        thread.cancel(pending)
        inbox.wait(2)
        more = Inbox()
        thread.submit([request_for(engine, TEXTS[1], 2)] * 3, more.listen)
        assert len(more.wait(3)) == 3


def test_who_is_refused_is_told_the_usual_time_of_a_request(folder: Path) -> None:
    """The time is a guess at first, and later that of requests that have ended."""
    engine, waits = tiny_engine(folder, sequences=1), list[int]()
    with running(engine, places=1) as thread:
        for count in (1, 30):
            for _ in range(count):
                inbox = Inbox()
                with engine._lock:
                    thread.submit([request_for(engine, TEXTS[0], 1, "plain")], inbox.listen)
                    with pytest.raises(QueueFull) as refused:
                        thread.submit([request_for(engine, TEXTS[0])], inbox.listen)
                inbox.wait(1)
            waits.append(refused.value.retry_after)
    assert waits[0] == FIRST_GUESS
    assert 1 <= waits[1] < FIRST_GUESS


@pytest.mark.parametrize(("tokens", "grace"), [(20, 60.0), (400, 0.0)], ids=["with grace", "without"])
def test_closing_lets_open_orders_end_or_tells_each_of_them(engine: Engine, tokens: int, grace: float) -> None:
    inbox = Inbox()
    thread = EngineThread(engine, 16, Metrics("tiny"))
    thread.start()
    thread.submit([request_for(engine, text, tokens) for text in TEXTS * 3], inbox.listen)
    thread.close(grace)
    ends = inbox.wait(9)
    assert_ended_once(inbox, 9)
    assert [end.outcome is not None for end in ends.values()] == [grace > 0] * 9
    assert {type(end.error) for end in ends.values()} == {type(None) if grace else Closing}
    assert engine.scheduler.pool.used_bytes == engine.scheduler.prefixes.bytes
    with pytest.raises(Closing):
        thread.submit([request_for(engine, TEXTS[0])], inbox.listen)


def test_orders_that_are_ended_before_their_turn_never_begin(engine: Engine) -> None:
    """The engine's thread is held in a step while requests are aborted and another one is submitted."""
    inbox, held, aborted = Inbox(), threading.Event(), threading.Event()

    def listen(place: int, event: Block | End) -> None:
        inbox.listen(0, event)
        held.set()
        aborted.wait(60)

    with running(engine) as thread:
        thread.submit([request_for(engine, TEXTS[0], 100)], listen)
        assert held.wait(60)
        thread.abort()
        thread.submit([request_for(engine, TEXTS[1], 100)], lambda _, event: inbox.listen(1, event))
        aborted.set()
        ends = inbox.wait(2)
        later = Inbox()
        thread.submit([request_for(engine, TEXTS[2], 5)], later.listen)
        assert later.wait(1)[0].outcome is not None
        assert thread.open == 0
        assert not engine.scheduler.running
    assert_ended_once(inbox, 2)
    assert {type(end.error) for end in ends.values()} == {Closing}


def test_a_thread_that_dies_tells_every_request(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even an error that is none of the engine's leaves nobody waiting."""
    inbox = Inbox()
    thread = EngineThread(engine, 16, Metrics("tiny"))
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    monkeypatch.setattr(thread, "_step", lambda: (_ for _ in ()).throw(SystemError("planted")))
    thread.start()
    thread.submit([request_for(engine, TEXTS[0])] * 3, inbox.listen)
    assert {type(end.error) for end in inbox.wait(3).values()} == {Closing}
    assert not thread.alive
