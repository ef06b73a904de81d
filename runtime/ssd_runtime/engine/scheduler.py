"""Decodes several sequences at once: every step is one forward of the full model for all of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from ssd_profiles.errors import UserError
from ssd_runtime.engine.prefix_cache import PrefixCache
from ssd_runtime.engine.session import POOL_ROOM, PREFILL_CHUNK, Load, Session
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.model.kv_cache import SPARE_SLOTS
from ssd_runtime.model.kv_pool import PoolFull
from ssd_runtime.model.runner import Forward, ModelRunner, Request, Work
from ssd_runtime.profiling.memory import DECODING_REMEDY, available_bytes, gib, guard_memory
from ssd_runtime.sampling.params import GREEDY, SamplingParams

T = TypeVar("T")
PREFILL_ROWS = 128
"""Most prompt rows in a step of decoding sequences, which wait for the whole step."""
CACHE_SHARE = 0.5
"""Largest share of the free memory that the pool of keys and values takes by default."""


@dataclass(slots=True, eq=False)
class Job(Generic[T]):
    """A sequence that waits, decodes together with others, or has ended."""

    session: Session
    work: Work[T]
    prompt: Sequence[int]
    request: Request | None = None
    """The latest request; None before the job runs."""
    result: T | None = None
    error: UserError | None = None
    """The error that it failed with; None without a failure."""
    done: bool = False
    """Whether it has ended, failed or been cancelled."""
    _paused: _Paused | None = None

    @property
    def tokens(self) -> int:
        """Number of tokens that it needs room for when it starts or resumes."""
        return max(len(self.prompt), self.session.committed) + POOL_ROOM

    @property
    def slots(self) -> int:
        """Most slots that its latest request, and the drafts after that, write."""
        return self.session.committed + (rows_of(self.request) if self._paused is None else 0) + SPARE_SLOTS

    @property
    def decodes(self) -> bool:
        """Whether its prompt has been run and the keys of all its tokens are there."""
        return self.session.prefilled and self._paused is None

    def advance(self, answer: Any) -> None:
        """Run the work with the answer to the latest request, up to the next request or the end."""
        try:
            with guard_memory("decoding", self.session.decoder.device, DECODING_REMEDY):
                self.request = self._next(answer)
        except StopIteration as stop:
            self.result = stop.value
            self.done = True
            self.session.close()
        except PoolFull:
            room = gib(self.session.cache.pool.bytes)
            self.fail(
                UserError(f"the {room} for keys and values are full; give a shorter prompt, or fewer prompts at once")
            )
        except UserError as error:
            self.fail(error)

    def pause(self) -> None:
        """Release the memory for keys and values until `resume`."""
        assert isinstance(self.request, Forward), "running jobs wait for a forward of the full model"
        session = self.session
        if self._paused is not None:
            self._paused.recomputing.close()
            self._paused = replace(self._paused, recomputing=session.recomputing())
        else:
            # The forward of an early-exit draft begins after its first layers and reads the keys that it left there.
            drafted = session.cache.save(session.committed, session.committed + self.request.size)
            self._paused = _Paused(self.request, drafted, session.recomputing())
        session.cache.release()

    def resume(self) -> None:
        """Reserve memory and request the forwards that compute the committed tokens' keys and values again."""
        assert self._paused is not None, "pause() comes first"
        self.session.cache.reserve_tokens(self.session.committed + POOL_ROOM)
        self.advance(None)

    def _next(self, answer: Any) -> Request:
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
        """The result of a job that has ended. Raises the UserError that it failed with."""
        if self.error is not None:
            raise self.error
        assert self.result is not None, "the job has neither ended nor failed: it was cancelled, or still runs"
        return self.result

    def fail(self, error: UserError | None) -> None:
        """End without a result: with an error, or with None for a cancelled job."""
        self.work.close()
        self.session.close(keep=False)
        self.error = error
        self.done = True


@dataclass(frozen=True, slots=True)
class _Paused:
    """The state of a paused job, which has released its memory."""

    request: Forward
    drafted: list[Tensor]
    """Keys and values of the request's rows, one tensor per layer."""
    recomputing: Work[None]


class Scheduler:
    """Admits jobs while `max_sequences` and the memory allow, and steps all running ones.

    A job's output does not depend on the other jobs, except for rounding at near ties. Keys and values are in one pool
    of `cache_bytes`. When that is full, prefixes of ended sequences are dropped first. Then the latest job is paused,
    and its keys are computed again later.
    """

    def __init__(self, decoder: Decoder, max_sequences: int, cache_bytes: int | None = None) -> None:
        """The pool has `pool_bytes` by default. Raises UserError if `max_sequences` is less than 1."""
        if max_sequences < 1:
            raise UserError(f"concurrency: {max_sequences} is too few; give 1 or more")
        self.decoder = decoder
        self.max_sequences = max_sequences
        if cache_bytes is None:
            cache_bytes = pool_bytes(decoder, max_sequences)
        # Twice the sequences: sliding layers have as much room for prefixes as for running sequences.
        self.pool = decoder.new_pool(cache_bytes, 2 * max_sequences)
        self.prefixes = PrefixCache(self.pool)
        self._runner = ModelRunner(decoder)
        self._waiting: deque[Job[Any]] = deque()
        self._paused: deque[Job[Any]] = deque()
        """Paused jobs, the oldest first: it was paused last."""
        self._running: list[Job[Any]] = []
        """Running jobs, the oldest first."""
        self._steps = 0

    @property
    def running(self) -> int:
        """Number of jobs that are being decoded."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Number of jobs that have not begun or are paused."""
        return len(self._waiting) + len(self._paused)

    def session(self, sampling: SamplingParams = GREEDY) -> Session:
        """Make a session for a job's work, with its memory in the pool."""
        return Session(self.decoder, sampling, self.prefixes)

    def add(self, session: Session, work: Work[T], prompt: Sequence[int]) -> Job[T]:
        """Queue the work of a sequence that begins with the tokens of `prompt`."""
        job = Job(session, work, prompt)
        self._waiting.append(job)
        return job

    def cancel(self, job: Job[Any]) -> None:
        """End a job at once, without an effect on the others. A job that is done stays as it is."""
        if job.done:
            return
        job.fail(None)
        self._running = [each for each in self._running if each is not job]
        for queue in (self._waiting, self._paused):
            if job in queue:
                queue.remove(job)

    def finish(self, job: Job[T]) -> T:
        """Step until a job ends; returns its result. Raises the UserError that it fails with."""
        try:
            while not job.done:
                self.step()
        finally:
            if not job.done:
                self.cancel(job)
        return job.ended()

    @torch.inference_mode()
    def step(self) -> list[Job[Any]]:
        """Run one forward of the full model for all jobs, and all other requests up to the next; returns ended jobs.

        These are heads, and drafts by masks and exits. Jobs with equal requests share a forward, until all of them wait
        for the full model again.
        """
        self._steps += 1
        self._make_room()
        ended = self._admit()
        self._catch_up()
        self._answer(self._joint())
        self._catch_up()
        ended += [job for job in self._running if job.done]
        self._running = [job for job in self._running if not job.done]
        return ended

    def _make_room(self) -> None:
        """Reserve the slots of every running job's next cycle; the latest jobs are paused for older ones."""
        for job in list(self._running):
            while job in self._running and not self._has_slots(job):
                self.pause_latest()

    def pause_latest(self) -> None:
        """Pause the latest running job until there is room again."""
        latest = self._running.pop()
        latest.pause()
        self._paused.appendleft(latest)

    def _has_slots(self, job: Job[Any]) -> bool:
        """Reserve the slots of a job's next cycle, dropping prefixes for it; returns whether there were enough."""
        while True:
            try:
                job.session.cache.reserve(job.slots, job.session.committed)
            except PoolFull:
                if self.prefixes.forget_oldest():
                    continue
                return len(self._running) == 1  # a lone job goes on until a request fails
            return True

    def _admit(self) -> list[Job[Any]]:
        """Start jobs while there is room, paused ones first; returns those that failed at once."""
        failed = list[Job[Any]]()
        while (queue := self._paused or self._waiting) and len(self._running) < self.max_sequences:
            job = queue[0]
            job.session.chunk = PREFILL_ROWS if self._running else PREFILL_CHUNK
            if self._running and not self._fits(job):
                break
            queue.popleft()
            if queue is self._paused:
                job.resume()
            else:
                job.advance(None)
            (failed if job.done else self._running).append(job)
        return failed

    def _catch_up(self) -> None:
        """Answer all other requests until every running job waits for the full model."""
        while drafting := [job for job in self._running if not (job.done or is_full(job.request))]:
            self._answer(drafting)

    def _fits(self, job: Job[Any]) -> bool:
        """Whether the pool has room for a job; prefixes of other sequences are dropped for it."""
        if job.session.cache.pool is not self.pool:
            return True
        known = job.session.known_prefix(job.prompt)
        return self.prefixes.make_room(job.tokens, known[0] if known else None)

    def _joint(self) -> list[Job[Any]]:
        """The jobs of the next joint forward: all that decode, and prompts of up to `PREFILL_ROWS` rows, at least one.

        It also sets the size of the prompts' next chunks.
        """
        decoding = [job for job in self._running if job.decodes]
        prompts = list[Job[Any]]()
        rows = 0
        for job in self._running:
            if job.decodes:
                continue
            job.session.chunk = PREFILL_ROWS if decoding else PREFILL_CHUNK
            rows += rows_of(job.request)
            if not prompts or rows <= PREFILL_ROWS:
                prompts.append(job)
        return decoding + prompts

    def _answer(self, jobs: Sequence[Job[Any]]) -> None:
        """Answer the jobs' requests; if memory runs out, all of these jobs fail."""
        if not jobs:
            return
        load = Load(sequences=len(jobs), rows=sum(rows_of(job.request) for job in jobs), step=self._steps)
        try:
            with guard_memory("decoding", self.decoder.device, DECODING_REMEDY):
                answers = self._runner.answer([job.request for job in jobs if job.request is not None])
        except UserError as error:
            for job in jobs:
                job.fail(error)
            return
        for job, answer in zip(jobs, answers, strict=True):
            if is_full(job.request):
                job.session.load = load
            job.advance(answer)


def is_full(request: Request | None) -> bool:
    """Whether a request is for the full model up to its last sub-layer, which all running jobs share."""
    return request is not None and request.is_full


def rows_of(request: Request | None) -> int:
    """Number of rows of a request; 0 without one."""
    return 0 if request is None else request.size


def pool_bytes(decoder: Decoder, sequences: int) -> int:
    """Bytes for `sequences` sequences of any length and as many prefixes; at most `CACHE_SHARE` of the free memory."""
    most = 2 * sequences * (decoder.shape.max_context + SPARE_SLOTS) * decoder.kv_layout.bytes_per_slot
    return min(most, int(CACHE_SHARE * available_bytes(decoder.device)))
