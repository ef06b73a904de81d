"""Decodes several sequences at once: every step runs the full model once for each of them, mostly in one forward."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Any, TypeVar

import numpy as np
import torch

from ssd_profiles.errors import UserError
from ssd_runtime.devices.memory import DECODING_REMEDY, available_bytes, guard_memory
from ssd_runtime.engine.interrupts import uninterrupted
from ssd_runtime.engine.job import Job, is_full, rows_of
from ssd_runtime.model.cache.kv_cache import GROWTH
from ssd_runtime.model.cache.kv_pool import SPARE_SLOTS, PoolFull
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.model.runner import ModelRunner, Work
from ssd_runtime.sampling.params import GREEDY, SamplingParams
from ssd_runtime.sequence.load import Load
from ssd_runtime.sequence.prefix_cache import PrefixCache
from ssd_runtime.sequence.session import POOL_ROOM, PREFILL_CHUNK, Session

T = TypeVar("T")
PREFILL_ROWS = 128
"""Most prompt rows in a step while sequences decode or draft, which wait for the whole step."""
HOLD_SECONDS = 0.1
"""Least limit, in seconds, on the drafts and searches of a step, for which all other sequences wait."""
HOLD_FORWARDS = 4.0
"""Least limit on the drafts and searches of a step, in fastest full forwards so far; the larger limit holds. Drafts
that `auto` shares among requests take less."""
CACHE_SHARE = 0.5
"""Largest share of the free memory that the pool of keys and values takes by default."""


class Scheduler:
    """Admits jobs while `max_sequences` and the memory allow, and steps all running ones.

    A job's output does not depend on the other jobs, except for rounding at near ties. Keys and values are in one pool
    of `cache_bytes`. When that is full, prefixes of ended sequences are dropped first. Then the latest job is paused,
    and its keys are computed again later. With a clock, a long draft or search goes on in later steps: in each, the
    others wait for it no longer than `HOLD_SECONDS` or `HOLD_FORWARDS`, and for one more request to the model.
    """

    def __init__(
        self,
        decoder: Decoder,
        max_sequences: int,
        cache_bytes: int | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """The pool has `pool_bytes` by default. `clock` gives the seconds that bound drafts in a step.

        Without it they take as long as they take, as is best where nobody waits for one sequence alone. Raises
        UserError for fewer than 1 sequence, or without memory.
        """
        if max_sequences < 1:
            raise UserError(f"max_sequences: expected 1 or more, got {max_sequences}")
        self.decoder = decoder
        self.max_sequences = max_sequences
        if cache_bytes is None:
            cache_bytes = pool_bytes(decoder, max_sequences)
        with guard_memory("reserving memory for keys and values", decoder.device, DECODING_REMEDY):
            # Twice the sequences: sliding layers have as much room for prefixes as for running sequences.
            self.pool = decoder.new_pool(cache_bytes, 2 * max_sequences)
        self.prefixes = PrefixCache(self.pool)
        self._runner = ModelRunner(decoder)
        self._waiting: deque[Job[Any]] = deque()
        self._paused: deque[Job[Any]] = deque()
        """Paused jobs in resume order. The newest job is paused first, so the oldest comes first here."""
        self._running: list[Job[Any]] = []
        """Running jobs, the oldest first."""
        self._stepping = Lock()
        """Held by a step, within which no other may begin."""
        self._steps = 0
        """Steps with a forward of the full model so far."""
        self._clock = clock or (lambda: 0.0)  # a clock that stands still, so that no limit is reached
        self._fastest = math.inf
        """Seconds of the fastest forward of the full model so far."""

    @property
    def running(self) -> int:
        """Number of jobs that are being decoded."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Number of jobs that have not begun or are paused."""
        return len(self._waiting) + len(self._paused)

    @property
    def most_tokens(self) -> int:
        """Most tokens of a request that the pool surely holds if it is the only one; at most the model's context."""
        layout = self.pool.layout
        context = self.decoder.shape.max_context
        most = self.pool.most_slots
        if most == layout.max_slots:
            return context
        # A sequence that outgrows its slots asks for 1 / `GROWTH` more at once.
        slots = most * GROWTH // (GROWTH + 1) - layout.key_multiple
        return max(0, min(context, slots - SPARE_SLOTS - POOL_ROOM))

    def session(self, sampling: SamplingParams = GREEDY, owner: str = "") -> Session:
        """Make a session for a job's work, with its memory in the pool; `owner` names its stream (`Session`)."""
        return Session(decoder=self.decoder, sampling=sampling, prefixes=self.prefixes, owner=owner)

    def add(self, session: Session, work: Work[T], prompt: Sequence[int]) -> Job[T]:
        """Queue the work of a sequence that begins with the tokens of `prompt`."""
        job = Job(session, work, np.asarray(prompt, np.int64))
        self._waiting.append(job)
        return job

    def cancel(self, job: Job[Any]) -> None:
        """End a job without an effect on the others. The result of a job that is done stays as it is.

        Callbacks of jobs may call this: for another job, which ends at once, or for their own (`Job.cancel`).
        """
        with uninterrupted():
            job.cancel()
            # A failed step may leave finished jobs in the queues, so this one is removed even if it is done.
            self._running = [each for each in self._running if each is not job]
            for queue in (self._waiting, self._paused):
                if job in queue:
                    queue.remove(job)

    def finish(self, job: Job[T]) -> T:
        """Step until a job ends; returns its result. Raises the error that it fails with."""
        try:
            while not job.done:
                self.step()
        finally:
            if not job.done:
                self.cancel(job)
        return job.ended()

    @torch.inference_mode()
    def step(self) -> list[Job[Any]]:
        """Run the full model for all running jobs that wait for it, then their drafts; returns the jobs that ended.

        After that, jobs request heads and draft forwards until each of them waits for the full model again. If the time
        for drafts is up before, those that are behind go on in the next step, after the others' forward.
        Requests that are alike (`Forward.key`) share a forward: of the full model all, except for those that keep
        states and those that go on after an early exit. Ctrl-C takes effect at the end of the step. Raises UserError
        within another step, of a callback's or another thread's.
        """
        with uninterrupted(), self._alone():
            self._make_room()
            known = len(self._running)
            ended = self._admit()
            self._catch_up(self._running[known:])
            began = self._clock()
            if joint := self._joint():
                self._steps += 1
                self._answer(joint)
                self._fastest = min(self._fastest, self._clock() - began)
            self._catch_up(self._running)
            ended += [job for job in self._running if job.done]
            self._running = [job for job in self._running if not job.done]
            return ended

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._stepping.acquire(blocking=False):
            raise UserError(
                "requests: a step is running; callbacks may add and cancel requests, but not step or generate, and a "
                "runner serves one thread"
            )
        try:
            yield
        finally:
            self._stepping.release()

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
            job = next((each for each in queue if queue is self._paused or not self._awaits(each)), None)
            if job is None:
                break
            job.session.chunk = PREFILL_ROWS if self._running else PREFILL_CHUNK
            if not self._fits(job):
                if self._running:
                    break
                while self.prefixes.forget_oldest():
                    pass  # a job that is alone gets all the memory there is, and may need less than reckoned
            queue.remove(job)
            if queue is self._paused:
                job.resume()
            else:
                job.advance(None)
            (failed if job.done else self._running).append(job)
        return failed

    def _catch_up(self, jobs: Sequence[Job[Any]]) -> None:
        """Answer the jobs' other requests, at least one of each, until all wait for the full model or time is up."""
        until = self._clock() + max(HOLD_SECONDS, HOLD_FORWARDS * self._fastest)
        while drafting := [job for job in jobs if not (job.done or is_full(job.request))]:
            self._answer(drafting)
            if self._clock() >= until:
                break

    def _awaits(self, job: Job[Any]) -> bool:
        """Whether to hold a job back because another is prefilling a longer shared prefix than any that is cached."""
        return any(job.session.awaits(job.prompt, other.session, other.prompt) for other in self._running)

    def _fits(self, job: Job[Any]) -> bool:
        """Whether the pool has room for a job; prefixes of other sequences are dropped for it."""
        if job.session.cache.pool is not self.pool:
            return True
        known = job.session.known_prefix(job.prompt)
        return self.prefixes.make_room(job.tokens, known[0] if known else None)

    def _joint(self) -> list[Job[Any]]:
        """Jobs of the next forward: all that decode, and prompts of `PREFILL_ROWS` rows at most, at least one.

        The oldest prompt comes first in every second step, and the one with the fewest tokens left in the others. Jobs
        whose drafts or searches are not done yet take no part.

        Sets the chunk size of the prompts' next forwards, too.
        """
        ready = [job for job in self._running if is_full(job.request)]
        decoding = [job for job in ready if job.decodes]
        prompts = [job for job in ready if not job.decodes]
        answering = any(job.decodes for job in self._running)  # those that draft wait for the step, too
        if self._steps % 2 == 0:
            prompts.sort(key=lambda job: len(job.prompt) - job.session.committed)
        joint = list[Job[Any]]()
        rows = 0
        for job in prompts:
            job.session.chunk = PREFILL_ROWS if answering else PREFILL_CHUNK
            if not joint or rows + rows_of(job.request) <= PREFILL_ROWS:
                joint.append(job)
                rows += rows_of(job.request)
        return decoding + joint

    def _answer(self, jobs: Sequence[Job[Any]]) -> None:
        """Answer the jobs' requests; if memory runs out, all of them fail, else those whose own forward fails."""
        if not jobs:
            return
        load = Load(
            sequences=len(jobs),
            rows=sum(rows_of(job.request) for job in jobs),
            context=sum(job.session.committed for job in jobs) // len(jobs),
            step=self._steps,
        )
        try:
            with guard_memory("decoding", self.decoder.device, DECODING_REMEDY):
                answers = self._runner.answer([job.request for job in jobs if job.request is not None])
        except Exception as error:  # each job raises it where its result is asked for; others go on
            for job in jobs:
                if len(jobs) == 1 or isinstance(error, UserError):
                    job.fail(error)
                elif not job.done:  # another's callback may have cancelled it
                    self._answer([job])
            return
        for job, answer in zip(jobs, answers, strict=True):
            if is_full(job.request):
                job.session.load = load
            job.advance(answer)


def run_alone(session: Session, work: Work[T], prompt: Sequence[int]) -> T:
    """Run the work of a lone sequence with memory of its own, in the steps that sequences share elsewhere.

    At its end a session of a pool is closed, as the session of every job is.
    """
    scheduler = Scheduler(session.decoder, 1, cache_bytes=0)
    return scheduler.finish(scheduler.add(session, work, prompt))


def pool_bytes(decoder: Decoder, sequences: int) -> int:
    """Bytes for all slots and states of `sequences` sequences, twice over; at most `CACHE_SHARE` of the free memory."""
    layout = decoder.kv_layout
    most = sequences * (layout.max_slots * layout.bytes_per_slot + 2 * layout.state_bytes)
    return min(most, int(CACHE_SHARE * available_bytes(decoder.device)))
