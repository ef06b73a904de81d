"""Decodes a file's prompts several at once, and reports them in the file's order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import perf_counter

from ssd_profiles.errors import UserError
from ssd_profiles.prompts import Prompt
from ssd_runtime.engine.job import Job
from ssd_runtime.engine.loop import generate
from ssd_runtime.engine.offline.runner import Runner, difference, next_messages
from ssd_runtime.engine.output.generation import Generation
from ssd_runtime.engine.output.output import Limits
from ssd_runtime.engine.output.result import Outcome
from ssd_runtime.engine.scheduler import Scheduler
from ssd_runtime.engine.turn import Turn, naming
from ssd_runtime.loading.loaded_model import conversation
from ssd_runtime.planning.plan import PlainPlanner
from ssd_runtime.planning.strategy import MakePlanner
from ssd_runtime.sequence.session import Session

WINDOW = 4
"""Under `compare`, batches of `WINDOW` × `concurrency` prompts are decoded in both ways in turn."""


@dataclass(slots=True)
class Answered:
    """A decoded prompt: an outcome per turn, and the error that ended it, if any."""

    prompt: Prompt
    outcomes: list[Outcome] = field(default_factory=list)
    error: UserError | None = None
    turns: list[Turn] = field(default_factory=list)
    """The turns that were begun."""


@dataclass(slots=True)
class Together:
    """Decodes up to `concurrency` prompts of one stream at once."""

    runner: Runner
    concurrency: int
    seconds: float = 0.0
    """Wall seconds of decoding with the strategy, prefills included."""
    plain_seconds: float = 0.0
    """Wall seconds of plain decoding under `compare`, prefills included."""

    def run(self, prompts: Sequence[Prompt]) -> Iterator[Answered]:
        """Decode all prompts; yields them in their order, each as soon as those before it are done.

        Under `compare` they are decoded plainly too, as many at once. The output is compared with plain decoding of
        each prompt alone.
        """
        numbered = [(prompt, self.runner.number(prompt)) for prompt in prompts]
        if not self.runner.settings.compare:
            yield from self._decoded(numbered, self.runner.make_planner)
            return
        for prompt, number in numbered[:1]:
            self._warm_up(prompt, number)
        size = WINDOW * self.concurrency
        for begin in range(0, len(numbered), size):
            yield from self._compared(numbered[begin : begin + size], strategy_first=begin // size % 2 == 0)

    def _warm_up(self, prompt: Prompt, number: int) -> None:
        """Decode a token of a prompt, since what is done once must not count for the way that comes first."""
        with suppress(UserError):
            turn = self.runner.turn(prompt, place=0, messages=conversation(prompt), number=number)
            generate(Session(self.runner.decoder, turn.sampling), turn.ids, PlainPlanner(), Limits(1))

    def _compared(self, prompts: Sequence[tuple[Prompt, int]], strategy_first: bool) -> Iterator[Answered]:
        """Decode some prompts with the strategy and plainly, one way after the other."""
        runs: dict[bool, list[Answered]] = {}
        for with_strategy in (strategy_first, not strategy_first):
            before = self.seconds
            make = self.runner.make_planner if with_strategy else PlainPlanner
            runs[with_strategy] = list(self._decoded(prompts, make))
            if not with_strategy:
                self.plain_seconds += self.seconds - before
                self.seconds = before
        for answered, plainly in zip(runs[True], runs[False], strict=True):
            for place, outcome in enumerate(answered.outcomes):
                plain = plainly.outcomes[place].generation if place < len(plainly.outcomes) else None
                answered.outcomes[place] = self._compared_alone(answered.turns[place], outcome.generation, plain)
            yield answered

    def _compared_alone(self, turn: Turn, generation: Generation, plain: Generation | None) -> Outcome:
        """The outcome of a turn, compared with plain decoding of the turn alone."""
        session = Session(self.runner.decoder, turn.sampling)
        alone = generate(session=session, prompt_ids=turn.ids, planner=PlainPlanner(), limits=turn.limits)
        divergence = difference(session=session, ids=turn.ids, plain=alone, generation=generation)
        return turn.outcome(generation, plain or alone, divergence)

    def _decoded(self, prompts: Sequence[tuple[Prompt, int]], make_planner: MakePlanner) -> Iterator[Answered]:
        """Decode prompts with their numbers, up to `concurrency` at once."""
        scheduler = Scheduler(self.runner.decoder, self.concurrency)
        conversations = [
            _Conversation(runner=self.runner, make_planner=make_planner, prompt=prompt, first=first)
            for prompt, first in prompts
        ]
        left = deque(conversations)
        active = dict[Job[Generation], _Conversation]()
        ready = 0
        while ready < len(conversations):
            began = perf_counter()
            while left and len(active) < self.concurrency:
                one = left.popleft()
                if (job := one.start(scheduler)) is not None:
                    active[job] = one
            for job in scheduler.step():
                one = active.pop(job)
                if (following := one.finish_turn(job, scheduler)) is not None:
                    active[following] = one
            self.seconds += perf_counter() - began
            while ready < len(conversations) and conversations[ready].done:
                yield conversations[ready].answered
                ready += 1


class _Conversation:
    """A prompt's turns, one job after the other."""

    def __init__(self, runner: Runner, make_planner: MakePlanner, prompt: Prompt, first: int) -> None:
        """`first` is the number of its first turn among all prompts' turns."""
        self.answered = Answered(prompt)
        self.done = False
        self._runner = runner
        self._make_planner = make_planner
        self._first = first
        self._messages = conversation(prompt)

    def start(self, scheduler: Scheduler) -> Job[Generation] | None:
        """Queue the next turn; returns its job. If it cannot be encoded, the conversation is done: returns None."""
        place = len(self.answered.outcomes)
        try:
            turn = self._runner.turn(
                self.answered.prompt, place=place, messages=self._messages, number=self._first + place
            )
        except UserError as error:
            self.answered.error = error
            self.done = True
            return None
        self.answered.turns.append(turn)
        return turn.start(scheduler, self._make_planner())

    def finish_turn(self, job: Job[Generation], scheduler: Scheduler) -> Job[Generation] | None:
        """Add the outcome of a turn that has ended; returns the next turn's job, or None after the last."""
        try:
            with naming(self.answered.prompt):
                generation = job.ended()
        except UserError as error:
            self.answered.error = error
            self.done = True
            return None
        turn = self.answered.turns[-1]
        outcome = turn.outcome(generation)
        self.answered.outcomes.append(outcome)
        following = next_messages(self.answered.prompt, turn.place, outcome)
        self._messages += following
        self.done = not following
        return self.start(scheduler) if following else None
