"""Decodes a user's prompts one after another with a strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

from ssd_profiles.errors import UserError
from ssd_profiles.prompts import Prompt
from ssd_runtime.engine.divergence import Divergence, compare
from ssd_runtime.engine.loop import Generation, Limits, decode, generate, generating
from ssd_runtime.engine.result import Outcome
from ssd_runtime.engine.scheduler import Job, Scheduler
from ssd_runtime.engine.session import Session
from ssd_runtime.engine.text_stream import TextStream, cut_at_stop, stop_condition
from ssd_runtime.loading.models import LoadedModel, conversation
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.planning.plan import PlainPlanner
from ssd_runtime.planning.strategy import MakePlanner
from ssd_runtime.profiling.memory import DECODING_REMEDY, guard_memory
from ssd_runtime.sampling.params import GREEDY, SamplingParams


@dataclass(frozen=True, slots=True)
class RunSettings:
    """Settings of one stream of prompts."""

    strategy: str = "auto"
    _: KW_ONLY
    parameters: Any = None
    """The strategy's: a class of `planning/settings.py`; None for their defaults."""
    max_new_tokens: int = 128
    stops: tuple[str, ...] = ()
    raw: bool = False
    compare: bool = False
    sampling: SamplingParams = GREEDY
    """The first prompt's; each further one has the next seed, so that equal prompts get answers of their own."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a prompt, ready to be decoded."""

    prompt: Prompt
    place: int
    """Among the prompt's turns, from 0."""
    ids: list[int]
    sampling: SamplingParams
    number: int
    """Among the turns of all prompts, from 0."""


@dataclass(slots=True)
class Runner:
    """A loaded model with a strategy; `write` receives text as it comes."""

    loaded: LoadedModel
    decoder: Decoder
    make_planner: MakePlanner
    settings: RunSettings
    write: Callable[[str], None]
    _turns: int = field(default=0)
    """Turns of the prompts so far, those that failed or were skipped included."""
    _scheduler: Scheduler | None = None

    @property
    def scheduler(self) -> Scheduler:
        """Decodes one prompt at a time, and keeps what a conversation's next turn begins with."""
        if self._scheduler is None:
            self._scheduler = Scheduler(self.decoder, 1)
        return self._scheduler

    def answer(self, text: str) -> Outcome:
        """Decode the answer to one message of a user's. Raises UserError where it does not fit into the context."""
        return next(self.run(Prompt("1", turns=(text,))))

    def run(self, prompt: Prompt) -> Iterator[Outcome]:
        """Decode a prompt, turn by turn; each turn sees the answers before it.

        Raises UserError where a turn does not fit into the context or the memory, or the chat template refuses it.
        The next prompt can be decoded all the same.
        """
        first, messages = self.number(prompt), conversation(prompt)
        for place in range(max(1, len(prompt.turns))):
            outcome = self._decoded(self.turn(prompt, place, messages, first + place))
            yield outcome
            messages += next_messages(prompt, place, outcome)

    def number(self, prompt: Prompt) -> int:
        """Count a prompt in; returns the number of its first turn among all prompts' turns, from 0.

        Turns are counted beforehand, so that one that fails changes no other prompt's seed.
        """
        first = self._turns
        self._turns += max(1, len(prompt.turns))
        return first

    def turn(self, prompt: Prompt, place: int, messages: list[tuple[str, str]], number: int) -> Turn:
        """A prompt's turn, encoded. Raises UserError where the chat template refuses its messages."""
        with naming(prompt):
            ids = self.loaded.encode(messages, self.settings.raw)
        return Turn(prompt, place, ids, self._sampling(number), number)

    def limits(self) -> Limits:
        """The limits of an answer, by the settings and the model."""
        stop = stop_condition(self.loaded.decode, self.settings.stops)
        return Limits(self.settings.max_new_tokens, self.loaded.eos_ids, stop)

    def start(
        self,
        turn: Turn,
        scheduler: Scheduler,
        on_tokens: Callable[[list[int]], None] | None = None,
        make_planner: MakePlanner | None = None,
    ) -> Job[Generation]:
        """Queue a turn; `make_planner` is the strategy's by default."""
        session, planner = scheduler.session(turn.sampling), (make_planner or self.make_planner)()
        return scheduler.add(session, generating(session, turn.ids, planner, self.limits(), on_tokens), turn.ids)

    def outcome(
        self,
        turn: Turn,
        generation: Generation,
        plain: Generation | None = None,
        divergence: Divergence | None = None,
    ) -> Outcome:
        """What the user is told of a turn that has been decoded."""
        settings, seed = self.settings, turn.sampling.seed if turn.sampling.random else None
        text = cut_at_stop(self.loaded.decode(generation.token_ids), settings.stops)
        return Outcome(turn.prompt, turn.place, settings.strategy, generation, text, plain, divergence, seed)

    def _decoded(self, turn: Turn) -> Outcome:
        """Decode a turn that is alone; its text is written as it comes."""
        stream = TextStream(self.loaded.decode, self.settings.stops, self.write)
        plain: Generation | None = None
        divergence: Divergence | None = None
        with naming(turn.prompt):
            if self.settings.compare:
                generation, plain, divergence = self._both(turn)
                stream.feed(generation.token_ids)
            else:
                generation = self.scheduler.finish(self.start(turn, self.scheduler, stream.feed))
        stream.close()
        return self.outcome(turn, generation, plain, divergence)

    def _sampling(self, number: int) -> SamplingParams:
        """The settings', with the seed of turn `number` and the model's own penalty where they have none."""
        asked = self.settings.sampling
        own = self.loaded.repetition_penalty
        penalty = own if asked.repetition_penalty is None else asked.repetition_penalty
        return replace(asked, seed=asked.seed + number, repetition_penalty=penalty)

    def _both(self, turn: Turn) -> tuple[Generation, Generation, Divergence | None]:
        """Plain decoding and the strategy after one prefill; they take turns in going first.

        Their outputs are compared unless rejection sampling makes them differ.
        """
        session, limits, runs = Session(self.decoder, turn.sampling), self.limits(), dict[str, Generation]()
        with guard_memory("decoding", self.decoder.device, DECODING_REMEDY):
            first = generate(session, turn.ids, PlainPlanner(), Limits(1))  # the prefill, timed, and a warm-up
            prefilled = session.prefill(turn.ids, new_tokens=limits.max_new_tokens)
            for name in ("plain", "strategy") if turn.number % 2 else ("strategy", "plain"):
                planner = PlainPlanner() if name == "plain" else self.make_planner()
                runs[name] = decode(session, prefilled, planner, limits, prefill_seconds=first.prefill_seconds)
            plain, generation = runs["plain"], runs["strategy"]
            return generation, plain, difference(session, turn.ids, plain, generation)


def difference(session: Session, ids: list[int], plain: Generation, generation: Generation) -> Divergence | None:
    """Compare an output with plain decoding's; None where tests by rejection make the two differ."""
    if session.sampling.tests_drafts:
        return None
    return compare(session, ids, plain.token_ids, generation.token_ids)


def next_messages(prompt: Prompt, place: int, outcome: Outcome) -> list[tuple[str, str]]:
    """The answer to a turn and the user's next message; none after the last turn."""
    following = prompt.turns[place + 1 : place + 2]
    return [message for text in following for message in (("assistant", outcome.text), ("user", text))]


@contextmanager
def naming(prompt: Prompt) -> Iterator[None]:
    """Let a UserError in the block name the prompt."""
    try:
        yield
    except UserError as error:
        raise UserError(f"prompt {prompt.id}: {str(error).removeprefix('prompt: ')}") from None
