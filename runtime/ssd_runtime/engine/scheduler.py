"""Decodes several sequences at once: every step is one forward of the full model for all of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from ssd_profiles.errors import UserError
from ssd_runtime.engine.session import PREFILL_CHUNK, Load, Session
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.model.kv_cache import SPARE_SLOTS
from ssd_runtime.model.runner import ModelRunner, Request, Work
from ssd_runtime.profiling.memory import DECODING_REMEDY, available_bytes, guard_memory

T = TypeVar("T")
PREFILL_ROWS = 128
"""Rows of prompts that join a step in which other sequences decode: these wait for the whole step."""
CACHE_SHARE = 0.5
"""Share of the free memory that the caches of all running sequences take by default."""


@dataclass(slots=True, eq=False)
class Job(Generic[T]):
    """A sequence that decodes beside others, or waits to."""

    session: Session
    work: Work[T]
    tokens: int
    """Tokens that its cache is to hold at most, as far as that is known beforehand."""
    request: Request | None = None
    """What it has asked for last; None before it runs."""
    result: T | None = None
    error: UserError | None = None
    """Why it failed, if it did."""
    done: bool = False

    def advance(self, answer: Any) -> None:
        """Go on with the answer to the last request, up to the next one or the end."""
        try:
            with guard_memory("decoding", self.session.decoder.device, DECODING_REMEDY):
                self.request = self.work.send(answer)
        except StopIteration as stop:
            self.result, self.done = stop.value, True
        except UserError as error:
            self.error, self.done = error, True

    def ended(self) -> T:
        """The result of a job that is done. Raises the UserError that it failed with."""
        if self.error is not None:
            raise self.error
        assert self.result is not None, "the job has neither ended nor failed: it was cancelled, or still runs"
        return self.result

    def fail(self, error: UserError) -> None:
        """End with an error."""
        self.work.close()
        self.error, self.done = error, True


class Scheduler:
    """Admits jobs while sequences and memory allow, and steps all that run.

    What a job decodes does not depend on the jobs beside it, but for rounding where logits nearly tie. It is admitted
    when the caches of all running jobs fit into `cache_bytes` together with its own; one that runs alone always is.
    """

    def __init__(self, decoder: Decoder, max_sequences: int, cache_bytes: int | None = None) -> None:
        if max_sequences < 1:
            raise UserError(f"concurrency: {max_sequences} is too few; give 1 or more")
        self.decoder, self.max_sequences = decoder, max_sequences
        self.cache_bytes = int(CACHE_SHARE * available_bytes(decoder.device)) if cache_bytes is None else cache_bytes
        self._runner = ModelRunner(decoder)
        self._waiting: deque[Job[Any]] = deque()
        self._running: list[Job[Any]] = []
        self._steps = 0

    @property
    def running(self) -> int:
        """Jobs that are being decoded."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Jobs that have not begun."""
        return len(self._waiting)

    def add(self, session: Session, work: Work[T], tokens: int) -> Job[T]:
        """Queue the work of a sequence whose cache will hold up to so many tokens."""
        job = Job(session, work, tokens)
        self._waiting.append(job)
        return job

    def cancel(self, job: Job[Any]) -> None:
        """End a job at once, whether it runs, waits or is done; the others do not notice."""
        job.work.close()
        job.done = True
        self._running = [each for each in self._running if each is not job]
        if job in self._waiting:
            self._waiting.remove(job)

    @torch.inference_mode()
    def step(self) -> list[Job[Any]]:
        """One forward of the full model for all, and what comes of it up to the next; returns the jobs that ended.

        Every running job waits for the full model when a step begins. After it come heads, then drafts by masks and
        exits, each shared by the jobs that ask for the same, until all wait for the full model again.
        """
        ended, self._steps = self._admit(), self._steps + 1
        self._answer(self._joint())
        while drafting := [job for job in self._running if not (job.done or waits_for_all(job.request))]:
            self._answer(drafting)
        ended += [job for job in self._running if job.done]
        self._running = [job for job in self._running if not job.done]
        return ended

    def _admit(self) -> list[Job[Any]]:
        """Start jobs as long as there is room; returns those that failed at once."""
        failed = list[Job[Any]]()
        while self._waiting and len(self._running) < self.max_sequences and self._fits(self._waiting[0]):
            job = self._waiting.popleft()
            job.session.chunk = PREFILL_ROWS if self._running else PREFILL_CHUNK
            job.advance(None)
            (failed if job.done else self._running).append(job)
        return failed

    def _fits(self, job: Job[Any]) -> bool:
        taken = sum(max(each.tokens, each.session.cache.capacity) for each in self._running)
        needed = taken + job.tokens + SPARE_SLOTS
        return not self._running or needed * job.session.cache.bytes_per_slot <= self.cache_bytes

    def _joint(self) -> list[Job[Any]]:
        """The jobs of the next joint forward: all that decode, and one prompt or more, up to `PREFILL_ROWS` rows."""
        decoding = [job for job in self._running if job.session.prefilled]
        prompts, rows = list[Job[Any]](), 0
        for job in self._running:
            if job.session.prefilled:
                continue
            job.session.chunk = PREFILL_ROWS if decoding else PREFILL_CHUNK
            rows += rows_of(job.request)
            if not prompts or rows <= PREFILL_ROWS:
                prompts.append(job)
        return decoding + prompts

    def _answer(self, jobs: Sequence[Job[Any]]) -> None:
        """Answer what the jobs ask for; where memory runs out, all of them fail."""
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
            if waits_for_all(job.request):
                job.session.load = load
            job.advance(answer)


def waits_for_all(request: Request | None) -> bool:
    """Whether a request is for the full model's last sub-layers, which all running jobs share."""
    return request is not None and request.is_full


def rows_of(request: Request | None) -> int:
    """Rows that a request takes through the model."""
    return 0 if request is None else request.size
