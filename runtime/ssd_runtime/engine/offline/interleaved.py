"""Times several planners on the same prompts, interleaved, so that drift of the machine's speed affects all alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter

from ssd_runtime.engine.job import Job
from ssd_runtime.engine.loop import decode, decoding
from ssd_runtime.engine.output.generation import Generation
from ssd_runtime.engine.output.output import Limits
from ssd_runtime.engine.scheduler import Scheduler
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.planning.plan import Planner
from ssd_runtime.sequence.prefill import Prefill
from ssd_runtime.sequence.session import Session

Contenders = Mapping[str, Callable[[], Planner]]
"""Names, each with a maker of one request's planner."""


def in_turn(
    session: Session, prompt: Prefill, contenders: Contenders, limits: Limits, turn: int = 0
) -> dict[str, Generation]:
    """Decode after one prefilled prompt with each contender; `turn` rotates the order."""
    names = list(contenders)
    shift = turn % len(names)
    order = names[shift:] + names[:shift]
    done = {name: decode(session=session, prompt=prompt, planner=contenders[name](), limits=limits) for name in order}
    return {name: done[name] for name in names}


class SharedRun:
    """One way to decode prefilled prompts, `sequences` at a time, with the time that it has taken."""

    def __init__(
        self,
        decoder: Decoder,
        held: Sequence[tuple[Session, Prefill]],
        make_planner: Callable[[], Planner],
        sequences: int,
        limits: Limits,
    ) -> None:
        self._sequences = sequences
        self._scheduler = Scheduler(decoder, sequences, cache_bytes=0)  # the sessions have memory of their own
        self._tokens = 0
        self._seconds = 0.0
        self.per_token = 0.0
        """Seconds per token while `sequences` sequences run; the end, when fewer are left, is excluded."""
        self.jobs: list[Job[Generation]] = [
            self._scheduler.add(session, decoding(session, prompt, make_planner(), limits, self._count), session.ids)
            for session, prompt in held
        ]

    @property
    def done(self) -> bool:
        """Whether all prompts are decoded."""
        return not (self._scheduler.running or self._scheduler.waiting)

    def steps(self, count: int) -> None:
        """Take `count` steps and time them."""
        for _ in range(count):
            began = perf_counter()
            self._scheduler.step()
            self._seconds += perf_counter() - began
            if not self.per_token or self._scheduler.waiting or self._scheduler.running == self._sequences:
                self.per_token = self._seconds / self._tokens

    def _count(self, tokens: list[int]) -> None:
        self._tokens += len(tokens)
