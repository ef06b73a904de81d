"""Time that a session waits for another one is not counted as its own work."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event, Thread
from time import sleep

import torch

from ssd_runtime.devices.clock import Stopwatch, WaitedLock
from ssd_runtime.engine.loop import decode
from ssd_runtime.engine.output.generation import Generation
from ssd_runtime.engine.output.output import Limits
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.planning.plan import PlainPlanner
from ssd_runtime.sequence.session import Session
from tests.models import tiny_model

HELD = 2.0
"""Seconds; a busy machine may hold a thread back for a large part of one."""


def run_while_held(work: Callable[[], None], lock: WaitedLock, held: Event, ready: Event | None = None) -> None:
    """Run `work` in a thread. Once it is `ready`, take the lock, set `held`, and release after `HELD` seconds."""
    thread = Thread(target=work)
    thread.start()
    if ready is not None:
        ready.wait()
    with lock:
        held.set()
        sleep(HELD)
    thread.join()


def test_a_lap_leaves_out_what_its_thread_waited() -> None:
    lock, held, laps = WaitedLock(), Event(), list[float]()

    def work() -> None:
        watch = Stopwatch(lock, torch.device("cpu"))
        held.wait()
        watch.lap()
        with lock, lock:
            sleep(0.02)
        laps.append(watch.lap())

    run_while_held(work, lock, held)
    assert 0.02 <= laps[0] < HELD
    assert lock.waited == 0.0, "of this thread"


def test_a_lap_may_end_in_a_thread_that_has_waited_before() -> None:
    lock, held = WaitedLock(), Event()
    watch = Stopwatch(lock, torch.device("cpu"))
    laps = list[float]()

    def work() -> None:
        held.wait()
        with lock:
            pass
        watch.lap()
        laps.append(lock.waited)

    run_while_held(work, lock, held)
    assert laps[0] > HELD / 2
    assert 0.0 <= watch.lap() < HELD / 2, "the time since the other thread's lap"


def test_cycles_are_timed_without_the_forwards_of_other_sessions() -> None:
    decoder, delivered, held, done = Decoder(tiny_model("llama")), Event(), Event(), list[Generation]()
    session = Session(decoder)
    prompt = session.prefill([1, 2, 3])

    def interrupt(tokens: list[int]) -> None:
        delivered.set()
        held.wait()

    def work() -> None:
        done.append(decode(session, prompt, PlainPlanner(), Limits(6), interrupt))

    run_while_held(work, decoder.lock, held, delivered)
    assert sum(cycle.seconds + cycle.plan_seconds for cycle in done[0].cycles) < HELD / 2
    assert done[0].decode_seconds >= HELD
