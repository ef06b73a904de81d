"""Decodes a user's prompts one after the other with a strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

from ssd_profiles.errors import UserError
from ssd_profiles.prompts import Prompt
from ssd_runtime.devices.memory import DECODING_REMEDY, guard_memory
from ssd_runtime.engine.job import Job
from ssd_runtime.engine.loop import decode, generate, generating
from ssd_runtime.engine.offline.divergence import Divergence, compare
from ssd_runtime.engine.offline.result import Outcome
from ssd_runtime.engine.output.generation import Generation
from ssd_runtime.engine.output.output import Limits
from ssd_runtime.engine.output.text_stream import TextStream, cut_at_stop, stop_condition
from ssd_runtime.engine.scheduler import Scheduler
from ssd_runtime.loading.models import LoadedModel, conversation
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.planning.plan import PlainPlanner
from ssd_runtime.planning.strategy import MakePlanner
from ssd_runtime.sampling.params import GREEDY, SamplingParams
from ssd_runtime.sequence.session import Session


@dataclass(frozen=True, slots=True)
class RunSettings:
    """Settings of one stream of prompts, as `ssd-run` has them."""

    strategy: str = "auto"
    """Name of a strategy, such as `plain` or `swift`."""
    _: KW_ONLY
    parameters: Any = None
    """The strategy's parameters, an object of `planning/settings.py`; None for the defaults."""
    max_new_tokens: int = 128
    """Most new tokens per answer."""
    stops: tuple[str, ...] = ()
    """Texts before the first of which an answer ends."""
    raw: bool = False
    """Whether prompts are encoded without the chat template."""
    compare: bool = False
    """Whether every prompt is decoded plainly as well, interleaved, and its output compared."""
    sampling: SamplingParams = GREEDY
    """Sampling of the first prompt. Prompt n has seed + n - 1, so that equal prompts may get different answers."""

    def of_prompt(self, number: int) -> RunSettings:
        """The settings of one prompt among several, counted from 0: with a seed of its own."""
        return replace(self, sampling=replace(self.sampling, seed=self.sampling.seed + number))


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a prompt, ready to be decoded."""

    prompt: Prompt
    place: int
    """Place among the prompt's turns, from 0."""
    ids: list[int]
    sampling: SamplingParams
    number: int
    """Number among the turns of all prompts, from 0."""


@dataclass(slots=True)
class Runner:
    """A loaded model with a strategy; `write` receives text as it comes."""

    loaded: LoadedModel
    decoder: Decoder
    make_planner: MakePlanner
    settings: RunSettings
    write: Callable[[str], None]
    _turns: int = field(default=0)
    """Turns of the prompts so far, including those that failed or were skipped."""
    _scheduler: Scheduler | None = None

    @property
    def scheduler(self) -> Scheduler:
        """A scheduler of one prompt at a time, which keeps the prefix of a conversation's next turn."""
        if self._scheduler is None:
            self._scheduler = Scheduler(self.decoder, 1)
        return self._scheduler

    def answer(self, text: str) -> Outcome:
        """Decode the answer to one message. Raises UserError if it does not fit into the context."""
        return next(self.run(Prompt("1", turns=(text,))))

    def run(self, prompt: Prompt) -> Iterator[Outcome]:
        """Decode a prompt, turn by turn; each turn sees the answers before it.

        Raises UserError if a turn does not fit into the context or the memory, or if the chat template refuses it.
        The next prompt can be decoded all the same.
        """
        first = self.number(prompt)
        messages = conversation(prompt)
        for place in range(max(1, len(prompt.turns))):
            turn = self.turn(prompt, place=place, messages=messages, number=first + place)
            outcome = self._decoded(turn)
            yield outcome
            messages += next_messages(prompt, place, outcome)

    def number(self, prompt: Prompt) -> int:
        """Count a prompt's turns; returns the number of its first turn among all prompts' turns, from 0.

        Turns are counted before they are decoded, so that a failed turn does not change another prompt's seed.
        """
        first = self._turns
        self._turns += max(1, len(prompt.turns))
        return first

    def turn(self, prompt: Prompt, place: int, messages: list[tuple[str, str]], number: int) -> Turn:
        """Encode a prompt's turn. Raises UserError if the chat template refuses its messages."""
        with naming(prompt):
            ids = self.loaded.encode(messages, self.settings.raw)
        return Turn(prompt=prompt, place=place, ids=ids, sampling=self.sampling(number), number=number)

    def limits(self) -> Limits:
        """The limits of an answer, by the settings and the model."""
        stops = self.settings.stops
        # Control tokens have no text in answers, so that their names are stops by id as well.
        control = self.loaded.prompts.control
        ends = self.loaded.eos_ids | {control[text] for text in stops if text in control}
        return Limits(self.settings.max_new_tokens, ends, stop_condition(self.loaded.decode, stops))

    def start(
        self,
        turn: Turn,
        scheduler: Scheduler,
        on_tokens: Callable[[list[int]], None] | None = None,
        make_planner: MakePlanner | None = None,
        owner: str = "",
        answered: Sequence[int] = (),
    ) -> Job[Generation]:
        """Queue a turn; `make_planner` is the strategy's by default, and `owner` names the stream of its prefixes.

        `answered` are the first tokens of its answer, where an earlier run has chosen them.
        """
        session = scheduler.session(turn.sampling, owner)
        work = generating(
            session=session,
            prompt_ids=turn.ids,
            planner=(make_planner or self.make_planner)(),
            limits=self.limits(),
            on_tokens=on_tokens,
            answered=answered,
        )
        return scheduler.add(session, work, [*turn.ids, *answered])

    def outcome(
        self,
        turn: Turn,
        generation: Generation,
        plain: Generation | None = None,
        divergence: Divergence | None = None,
    ) -> Outcome:
        """The outcome of a turn that has been decoded."""
        return Outcome(
            prompt=turn.prompt,
            turn=turn.place,
            strategy=self.settings.strategy,
            generation=generation,
            text=cut_at_stop(self.loaded.decode(generation.token_ids), self.settings.stops),
            plain=plain,
            divergence=divergence,
            seed=turn.sampling.seed if turn.sampling.random else None,
        )

    def _decoded(self, turn: Turn) -> Outcome:
        """Decode a lone turn; its text is written as it comes."""
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
        return self.outcome(turn=turn, generation=generation, plain=plain, divergence=divergence)

    def sampling(self, number: int) -> SamplingParams:
        """The settings' sampling with the seed of turn `number`, and with the model's own penalty by default."""
        asked = self.settings.of_prompt(number).sampling
        own = self.loaded.repetition_penalty
        penalty = own if asked.repetition_penalty is None else asked.repetition_penalty
        return replace(asked, repetition_penalty=penalty)

    def _both(self, turn: Turn) -> tuple[Generation, Generation, Divergence | None]:
        """Decode with the strategy and plainly after one prefill, each first for every other turn.

        Returns both generations and their difference.
        """
        session = Session(self.decoder, turn.sampling)
        limits = self.limits()
        runs = dict[str, Generation]()
        with guard_memory("decoding", self.decoder.device, DECODING_REMEDY):
            # One token times the prefill and warms up.
            first = generate(session=session, prompt_ids=turn.ids, planner=PlainPlanner(), limits=Limits(1))
            prefilled = session.prefill(turn.ids, new_tokens=limits.max_new_tokens)
            for name in ("plain", "strategy") if turn.number % 2 else ("strategy", "plain"):
                runs[name] = decode(
                    session=session,
                    prompt=prefilled,
                    planner=PlainPlanner() if name == "plain" else self.make_planner(),
                    limits=limits,
                    prefill_seconds=first.prefill_seconds,
                )
            plain = runs["plain"]
            generation = runs["strategy"]
            differing = difference(session=session, ids=turn.ids, plain=plain, generation=generation)
            return generation, plain, differing


def difference(session: Session, ids: list[int], plain: Generation, generation: Generation) -> Divergence | None:
    """Compare an output with plain decoding's; None if tests by rejection make the two differ."""
    if session.sampling.tests_drafts:
        return None
    return compare(session=session, prompt_ids=ids, plain=plain.token_ids, other=generation.token_ids)


def next_messages(prompt: Prompt, place: int, outcome: Outcome) -> list[tuple[str, str]]:
    """The answer to a turn and the user's next message; empty after the last turn."""
    following = prompt.turns[place + 1 : place + 2]
    return [message for text in following for message in (("assistant", outcome.text), ("user", text))]


@contextmanager
def naming(prompt: Prompt) -> Iterator[None]:
    """Add the prompt's id to a UserError that the block raises."""
    try:
        yield
    except UserError as error:
        raise type(error)(f"prompt {prompt.id}: {str(error).removeprefix('prompt: ')}") from None
