"""Runs an engine in one thread of its own, for callers in other threads."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from time import perf_counter

from ssd_artifacts.bundle import Bundle
from ssd_runtime.engine.engine import Engine
from ssd_runtime.engine.observed import Observation
from ssd_runtime.engine.turn import Request
from ssd_runtime.serving.http.metrics import Metrics
from ssd_runtime.serving.http.pending import End, GenerationRequest, Listener, PendingRequest

FIRST_GUESS = 5.0
"""Seconds that a request is expected to take before any has ended."""
MOST_RETRY_AFTER = 60


class Refused(Exception):  # noqa: N818 - an answer to the caller, not a failure of the engine
    """Requests were not taken: none of them will be decoded, and no event comes for them."""


class QueueFull(Refused):
    """All places are taken; `retry_after` is an estimate of the seconds until one is free."""

    def __init__(self, retry_after: int) -> None:
        super().__init__(f"all places are taken; try again in {retry_after} s")
        self.retry_after = retry_after


class Closing(Refused):
    """The engine is shutting down, or its thread has ended."""

    def __init__(self) -> None:
        super().__init__("the server is shutting down")


class _Stopped(Exception):  # noqa: N818 - it ends a measurement, and is no failure
    """The thread is to end."""


class EngineThread:
    """Steps an engine while there are requests, and measures the device, if that has to be done, while there are none.

    Every request that `submit` takes ends exactly once, with one `End`, whatever fails: an answer, an error or a
    cancellation. Events of a request come from the engine's thread, in order, and listeners must not block. At most
    `places` requests are open at once; more are refused.
    """

    def __init__(self, engine: Engine, places: int, metrics: Metrics) -> None:
        self.engine = engine
        self.places = places
        self._metrics = metrics
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._live: dict[Request, PendingRequest] = {}
        """Requests of the engine, with ours; only the engine's thread touches it."""
        self._lock = threading.Lock()
        self._open: set[PendingRequest] = set()
        self._closing = False
        self._stopping = False
        self._usual_seconds = FIRST_GUESS
        self._thread = threading.Thread(target=self._run, name="ssd-engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether requests are taken."""
        return self._thread.is_alive() and not self._closing

    @property
    def open(self) -> int:
        """Number of requests that have not ended."""
        return len(self._open)

    @property
    def running(self) -> int:
        """Number of requests that are being decoded."""
        return self.engine.scheduler.running

    @property
    def waiting(self) -> int:
        """Number of requests that wait for a place in the next step."""
        return max(0, self.open - self.running)

    def submit(self, requests: Sequence[GenerationRequest], listener: Listener) -> list[PendingRequest]:
        """Queue requests, all of them or none; `listener` is called with the place in `requests` and each event.

        Raises QueueFull or Closing.
        """
        pending = [PendingRequest(request, partial(listener, place)) for place, request in enumerate(requests)]
        with self._lock:
            if not self.alive:
                raise Closing
            if len(self._open) + len(requests) > self.places:
                raise QueueFull(self._retry_after())
            self._open.update(pending)
            self._commands.put(partial(self._begin, pending))
        return pending

    def cancel(self, pending: Sequence[PendingRequest]) -> None:
        """End requests soon, without an effect on others; those that have ended stay as they are."""
        for each in pending:
            each.cancelled = True

    def use_bundle(self, bundle: Bundle) -> Future[None]:
        """Plan requests to come with another bundle, which has passed the engine's `require_fitting`."""
        done: Future[None] = Future()

        def change() -> None:
            try:
                self.engine.use_bundle(bundle)
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
        """Take no more requests; open ones go on."""
        with self._lock:
            self._closing = True

    def close(self, grace: float) -> None:
        """Let open requests end within `grace` seconds, end the others with `Closing`, and end the thread."""
        self.refuse_more()
        self._commands.put(self._stop)
        self._thread.join(grace)
        self.abort()
        self._thread.join()

    def abort(self) -> None:
        """End all open requests with `Closing`, soon."""
        self._commands.put(partial(self._fail_all, Closing()))

    def _retry_after(self) -> int:
        """Seconds until a place is expected to be free."""
        rounds = len(self._open) / max(1, self.engine.max_sequences)
        return max(1, min(MOST_RETRY_AFTER, math.ceil(rounds * self._usual_seconds)))

    # The engine's thread runs everything below.

    def _run(self) -> None:
        try:
            tried = False
            while not self._stopping or self._live:
                if not (tried or self._live) and self.engine.must_be_measured:
                    tried = True
                    self._measure()
                    continue  # it may have been ended
                self._turn(wait=not self._live)
        finally:
            with self._lock:
                self._closing = True
            while not self._commands.empty():
                self._commands.get()()
            self._fail_all(Closing())

    def _measure(self) -> None:
        """Measure the device. Requests that come meanwhile wait for the end of one pass through the model at most."""
        try:
            self.engine.measure(self._serve)
        except _Stopped:
            pass
        except Exception as error:  # requests can be answered without
            self._metrics.on_defect(error)

    def _serve(self) -> None:
        """Answer the requests that there are; raises _Stopped if the thread is to end."""
        while self._live or not self._commands.empty():
            self._turn(wait=False)
        if self._stopping:
            raise _Stopped

    def _turn(self, wait: bool) -> None:
        """Execute the callers' commands, at least one with `wait`, and step."""
        while wait or not self._commands.empty():
            self._commands.get()()
            wait = False
        self._drop_cancelled()
        if self._live:
            self._step()

    def _stop(self) -> None:
        self._stopping = True

    def _begin(self, submitted: Sequence[PendingRequest]) -> None:
        """Hand requests to the engine."""
        for pending in submitted:
            if pending.ended is not None:
                continue  # all open requests were ended before this one's turn
            if pending.cancelled:
                self._end(pending, End(cancelled=True))
                continue
            try:
                request = self.engine.add_request(
                    pending.request.ids,
                    pending.request.settings,
                    pending.write if pending.request.in_blocks else None,
                    stream=pending.request.stream,
                    on_tokens=partial(self._on_tokens, pending),
                    on_cycle=partial(self._on_cycle, pending),
                    answered=pending.request.answered,
                )
            except Exception as error:  # it is the request's end, not the thread's
                self._end(pending, End(error=error))
                continue
            self._live[request] = pending

    def _on_cycle(self, pending: PendingRequest, observation: Observation) -> None:
        """Note a cycle of a request; its tokens follow."""
        pending.next_origins = observation.cycle.origins
        pending.plain_seconds = observation.plain_seconds
        self._metrics.on_cycle(observation)

    def _on_tokens(self, pending: PendingRequest, ids: list[int]) -> None:
        """Note new tokens of a request; their text follows."""
        now = perf_counter()
        if pending.first is None:
            pending.first = now
        else:
            self._metrics.on_tokens(len(ids), now - pending.latest)
        pending.latest = now
        pending.tokens += ids
        pending.origins += pending.next_origins

    def _step(self) -> None:
        """Run one step of the engine, and end the pending requests that it finished."""
        began = perf_counter()
        try:
            ended = self.engine.step()
        except Exception as error:  # a defect of ours: nothing is known of the requests, so all of them end
            self._fail_all(error)
            return
        for request, pending in self._live.items():
            if pending.begun is None and request.job.request is not None:
                pending.begun = began
        for request in ended:
            pending = self._live.pop(request)
            try:
                end = End(outcome=request.outcome(), tokens=tuple(pending.tokens), origins=tuple(pending.origins))
            except Exception as error:  # the request's own failure
                end = End(error=error)
            self._end(pending, end)

    def _drop_cancelled(self) -> None:
        """End the requests that were cancelled since the last step."""
        for request, pending in list(self._live.items()):
            if pending.cancelled:
                self._drop(request)
                self._end(pending, End(cancelled=True))

    def _fail_all(self, error: Exception) -> None:
        """End every open request with an error."""
        for request in list(self._live):
            self._drop(request)
        for pending in list(self._open):
            self._end(pending, End(error=error))

    def _drop(self, request: Request) -> None:
        del self._live[request]
        try:
            self.engine.cancel(request)
        except Exception as error:  # a defect in one request's clean-up must not reach the others
            self._metrics.on_defect(error)

    def _end(self, pending: PendingRequest, end: End) -> None:
        """Tell a request's end, once."""
        with self._lock:
            if pending not in self._open:
                return
            self._open.discard(pending)
        pending.ended = perf_counter()
        if end.outcome is not None:
            self._usual_seconds += 0.1 * (pending.ended - (pending.begun or pending.submitted) - self._usual_seconds)
        self._metrics.on_end(pending, end)
        pending.tell(end)
