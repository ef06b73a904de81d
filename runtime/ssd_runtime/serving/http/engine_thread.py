"""Runs an engine in one thread of its own, for callers in other threads."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from time import perf_counter

from ssd_artifacts.bundle import Bundle
from ssd_runtime.engine.engine import Engine
from ssd_runtime.engine.request import Request
from ssd_runtime.serving.http.tickets import Block, End, Listener, NoObserver, Observer, Order, Ticket

FIRST_GUESS = 5.0
"""Seconds that a request is expected to take before any has ended."""
MOST_RETRY_AFTER = 60


class Refused(Exception):  # noqa: N818 - an answer to the caller, not a failure of the engine
    """Orders were not taken: none of them will be decoded, and no event comes for them."""


class QueueFull(Refused):
    """All places are taken; `retry_after` is an estimate of the seconds until one is free."""

    def __init__(self, retry_after: int) -> None:
        super().__init__(f"all places are taken; try again in {retry_after} s")
        self.retry_after = retry_after


class Closing(Refused):
    """The engine is shutting down, or its thread has ended."""

    def __init__(self) -> None:
        super().__init__("the server is shutting down")


@dataclass(slots=True)
class _Live:
    """A ticket whose request the engine decodes."""

    ticket: Ticket
    request: Request
    last: float = field(default_factory=perf_counter)
    """Time of the latest tokens."""
    pending: list[int] = field(default_factory=list)
    """Tokens that were not reported yet, because their text is held back."""


class EngineThread:
    """Steps an engine while there are requests.

    Every order that `submit` takes ends exactly once, with one `End`, whatever fails: an answer, an error or a
    cancellation. Events of an order come from the engine's thread, in order, and listeners must not block. At most
    `places` orders are open at once; more are refused.
    """

    def __init__(self, engine: Engine, places: int, observer: Observer | None = None) -> None:
        self.engine = engine
        self.places = places
        self._observer = observer or NoObserver()
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._live: dict[Request, _Live] = {}
        """Requests of the engine; only the engine's thread touches it."""
        self._lock = threading.Lock()
        self._open: set[Ticket] = set()
        self._closing = False
        self._stopping = False
        self._usual_seconds = FIRST_GUESS
        self._thread = threading.Thread(target=self._run, name="ssd-engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether orders are taken."""
        return self._thread.is_alive() and not self._closing

    @property
    def open(self) -> int:
        """Number of orders that have not ended."""
        return len(self._open)

    @property
    def running(self) -> int:
        """Number of requests that are being decoded."""
        return self.engine.scheduler.running

    @property
    def waiting(self) -> int:
        """Number of orders that wait for a place in the next step."""
        return max(0, self.open - self.running)

    def submit(self, orders: Sequence[Order], listener: Listener) -> list[Ticket]:
        """Queue orders, all of them or none; `listener` is called with the place in `orders` and each event.

        Raises QueueFull or Closing.
        """
        tickets = [Ticket(order, partial(listener, place)) for place, order in enumerate(orders)]
        with self._lock:
            if not self.alive:
                raise Closing
            if len(self._open) + len(orders) > self.places:
                raise QueueFull(self._retry_after())
            self._open.update(tickets)
            self._commands.put(partial(self._begin, tickets))
        return tickets

    def cancel(self, tickets: Sequence[Ticket]) -> None:
        """End orders soon, without an effect on others; those that have ended stay as they are."""
        for ticket in tickets:
            ticket.cancelled = True

    def take_up(self, bundle: Bundle) -> Future[None]:
        """Plan orders to come with another bundle, which has passed the engine's `require_fitting`."""
        done: Future[None] = Future()

        def change() -> None:
            try:
                self.engine.take_up(bundle)
            except Exception as error:  # handed to the caller; the engine goes on with the bundle that it has
                done.set_exception(error)
            else:
                done.set_result(None)

        with self._lock:
            if self._closing:
                raise Closing
            self._commands.put(change)
        return done

    def refuse_more(self) -> None:
        """Take no more orders; open ones go on."""
        with self._lock:
            self._closing = True

    def close(self, grace: float) -> None:
        """Let open orders end within `grace` seconds, end the others with `Closing`, and end the thread."""
        self.refuse_more()
        self._commands.put(self._stop)
        self._thread.join(grace)
        self.abort()
        self._thread.join()

    def abort(self) -> None:
        """End all open orders with `Closing`, soon."""
        self._commands.put(partial(self._fail_all, Closing()))

    def _retry_after(self) -> int:
        """Seconds until a place is expected to be free."""
        rounds = len(self._open) / max(1, self.engine.max_sequences)
        return max(1, min(MOST_RETRY_AFTER, math.ceil(rounds * self._usual_seconds)))

    # The engine's thread runs everything below.

    def _run(self) -> None:
        try:
            while not self._stopping or self._live:
                self._obey(wait=not self._live)
                self._drop_cancelled()
                if self._live:
                    self._step()
        finally:
            with self._lock:
                self._closing = True
            while not self._commands.empty():
                self._commands.get()()
            self._fail_all(Closing())

    def _obey(self, wait: bool) -> None:
        """Execute the callers' commands; with `wait`, at least one."""
        if wait:
            self._commands.get()()
        while not self._commands.empty():
            self._commands.get()()

    def _stop(self) -> None:
        self._stopping = True

    def _begin(self, tickets: Sequence[Ticket]) -> None:
        """Hand tickets to the engine."""
        for ticket in tickets:
            if ticket.ended is not None:
                continue  # all open orders were ended before this one's turn
            if ticket.cancelled:
                self._end(ticket, End(cancelled=True))
                continue
            receiver = _Receiver(self, ticket)
            try:
                request = self.engine.add_request(
                    ticket.order.ids,
                    ticket.order.settings,
                    receiver.write,
                    stream=ticket.order.stream,
                    on_tokens=receiver.tokens,
                    on_cycle=self._observer.on_cycle,
                    answered=ticket.order.answered,
                )
            except Exception as error:  # it is the order's end, not the thread's
                self._end(ticket, End(error=error))
                continue
            receiver.live = self._live[request] = _Live(ticket, request)

    def _step(self) -> None:
        """Run one step of the engine, and end the orders whose requests it ended."""
        began = perf_counter()
        try:
            ended = self.engine.step()
        except Exception as error:  # a defect of ours: nothing is known of the requests, so all of them end
            self._fail_all(error)
            return
        for live in self._live.values():
            if live.ticket.begun is None and live.request.job.request is not None:
                live.ticket.begun = began
        for request in ended:
            live = self._live.pop(request)
            self._end(live.ticket, self._result(live))

    def _result(self, live: _Live) -> End:
        try:
            return End(outcome=live.request.outcome(), tokens=tuple(live.pending))
        except Exception as error:  # the request's own failure
            return End(error=error)

    def _drop_cancelled(self) -> None:
        """End the orders that were cancelled since the last step."""
        for request, live in list(self._live.items()):
            if live.ticket.cancelled:
                self._drop(request)
                self._end(live.ticket, End(cancelled=True))

    def _fail_all(self, error: Exception) -> None:
        """End every open order with an error."""
        for request in list(self._live):
            self._drop(request)
        for ticket in list(self._open):
            self._end(ticket, End(error=error))

    def _drop(self, request: Request) -> None:
        del self._live[request]
        try:
            self.engine.cancel(request)
        except Exception as error:  # a defect in one request's clean-up must not reach the others
            self._observer.on_defect(error)

    def _end(self, ticket: Ticket, end: End) -> None:
        """Tell a ticket's end, once."""
        with self._lock:
            if ticket not in self._open:
                return
            self._open.discard(ticket)
        ticket.ended = perf_counter()
        if end.outcome is not None:
            self._usual_seconds += 0.1 * (ticket.ended - (ticket.begun or ticket.submitted) - self._usual_seconds)
        self._observer.on_end(ticket, end)
        ticket.tell(end)


@dataclass(slots=True)
class _Receiver:
    """Turns an order's tokens and text into blocks."""

    thread: EngineThread
    ticket: Ticket
    live: _Live | None = None

    def tokens(self, ids: list[int]) -> None:
        """Note new tokens; their text follows."""
        assert self.live is not None, "tokens come in steps, after the request was added"
        now = perf_counter()
        if self.ticket.first is None:
            self.ticket.first = now
        else:
            self.thread._observer.on_tokens(len(ids), now - self.live.last)
        self.live.last = now
        self.live.pending += ids

    def write(self, text: str) -> None:
        """Tell a block, unless its text is held back."""
        assert self.live is not None, "text comes in steps, after the request was added"
        if text:
            self.ticket.tell(Block(text, tuple(self.live.pending)))
            self.live.pending.clear()
