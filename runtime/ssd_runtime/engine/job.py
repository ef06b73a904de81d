"""A sequence in the scheduler: its work (a generator), its latest request and its result."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from ssd_profiles.errors import UserError
from ssd_runtime.devices.memory import DECODING_REMEDY, OutOfMemoryError, gib, guard_memory
from ssd_runtime.model.cache.kv_cache import Saved
from ssd_runtime.model.cache.kv_pool import SPARE_SLOTS, PoolFull
from ssd_runtime.model.runner import ModelRequest, Work
from ssd_runtime.sequence.session import POOL_ROOM, Session

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Job(Generic[T]):
    """A sequence that waits, decodes together with others, or has ended."""

    session: Session
    work: Work[T]
    prompt: NDArray[np.int64]
    """Token ids [n]. Each step compares those of waiting jobs with what is known, hence an array."""
    request: ModelRequest | None = None
    """The latest request; None before the job runs."""
    result: T | None = None
    error: Exception | None = None
    """The exception that ended it: a UserError, or a defect of the engine; None if it did not fail."""
    done: bool = False
    """Whether it has ended, failed or been cancelled."""
    _paused: _Paused | None = None
    _cancelled: bool = False
    """Whether its own callback has cancelled it, so that it ends when the callback has returned."""

    @property
    def tokens(self) -> int:
        """Number of tokens that it needs room for when it starts or resumes."""
        return max(len(self.prompt) + POOL_ROOM, self.session.committed + self._room)

    @property
    def _room(self) -> int:
        """Slots after the committed tokens: at least as many as a paused job's request needs when it resumes."""
        return max(POOL_ROOM, 0 if self._paused is None else rows_of(self._paused.request))

    @property
    def slots(self) -> int:
        """Most slots that its requests so far and the next cycle's drafts write."""
        return self.session.written + SPARE_SLOTS

    @property
    def decodes(self) -> bool:
        """Whether its prompt has been run and the keys of all its tokens are there."""
        return self.session.prefilled and self._paused is None

    def advance(self, answer: Any) -> None:
        """Run the work with the answer to the latest request, up to the next request or the end.

        A job that is done stays so: another job's callback may have cancelled it in this very step.
        """
        if self.done:
            return
        try:
            with guard_memory("decoding", self.session.decoder.device, DECODING_REMEDY):
                self.request = self._next(answer)
        except StopIteration as stop:
            if not self._cancelled:  # by its own callback, which was given its last tokens
                self.result = stop.value
            self._end(keep=not self._cancelled)
        except PoolFull:
            self._fail_of_memory()
        except Exception as error:  # raised where the result is asked for, so that other jobs go on
            self.fail(error)
        else:
            if self._cancelled:
                self.fail(None)

    def pause(self) -> None:
        """Release the memory for keys and values until `resume`."""
        assert self.request is not None, "it runs"
        session = self.session
        if self._paused is not None:
            self._paused.recomputing.close()
            self._paused = replace(self._paused, recomputing=session.recomputing())
        else:
            # A draft that goes on reads the keys of its first tokens; one by early exit those in its first layers too.
            drafted = session.cache.save(session.committed, session.written)
            self._paused = _Paused(self.request, drafted, session.recomputing())
        session.release()

    def resume(self) -> None:
        """Reserve memory and request the forwards that compute the committed tokens' keys and values again."""
        assert self._paused is not None, "pause() comes first"
        try:
            self.session.cache.reserve_tokens(self.session.committed + self._room)
        except PoolFull:
            self._fail_of_memory()
        else:
            self.advance(None)

    def _next(self, answer: Any) -> ModelRequest:
        """The next request: of the work, or of computing a paused job's keys and values again."""
        paused = self._paused
        if paused is None:
            return self.work.send(answer)
        try:
            return paused.recomputing.send(answer)
        except StopIteration:
            self.session.cache.load(self.session.committed, paused.drafted)
            self._paused = None
            return paused.request

    def ended(self) -> T:
        """The result of a job that has ended.

        Raises the error that it failed with, and UserError if it was cancelled or has not ended.
        """
        if self.error is not None:
            raise self.error
        if self.result is None:
            told = "it was cancelled; add it again" if self.done else "it has not ended; call Engine.step until it has"
            raise UserError(f"request: {told}")
        return self.result

    def fail(self, error: Exception | None) -> None:
        """End without a result: with an error, or with None for a cancelled job. One that is done stays as it is."""
        if self.done:
            return
        self.work.close()
        self.error = error
        self._end(keep=False)

    def _end(self, keep: bool = True) -> None:
        """Release all that only a running job needs: its caller may hold on to it."""
        self.session.close(keep)
        self.request = None
        self.done = True

    def cancel(self) -> None:
        """End without a result: at once, or when the job's own callback returns, if that is the caller."""
        if inspect.getgeneratorstate(self.work) == inspect.GEN_RUNNING:
            self._cancelled = True
        else:
            self.fail(None)

    def _fail_of_memory(self) -> None:
        """End with the error that the pool is full."""
        room = gib(self.session.cache.pool.bytes)
        self.fail(
            OutOfMemoryError(
                f"the {room} for keys and values are full; shorten the prompt, or decode fewer prompts at once"
            )
        )


@dataclass(frozen=True, slots=True)
class _Paused:
    """The state of a paused job, which has released its memory."""

    request: ModelRequest
    drafted: Saved
    """The content of the slots after the committed tokens, the request's rows included."""
    recomputing: Work[None]


def is_full(request: ModelRequest | None) -> bool:
    """Whether a request is for the full model up to its last sub-layer, which all running jobs share."""
    return request is not None and request.is_full


def rows_of(request: ModelRequest | None) -> int:
    """Number of rows of a request; 0 without one."""
    return 0 if request is None else request.size
