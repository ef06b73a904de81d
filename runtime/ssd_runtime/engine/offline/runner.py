"""Decodes a user's prompts one after the other with a strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from ssd_profiles.prompts import Prompt
from ssd_runtime.devices.memory import DECODING_REMEDY, guard_memory
from ssd_runtime.engine.loop import decode, generate
from ssd_runtime.engine.output.divergence import Divergence, compare
from ssd_runtime.engine.output.generation import Generation
from ssd_runtime.engine.output.output import Limits
from ssd_runtime.engine.output.result import Outcome
from ssd_runtime.engine.output.text_stream import TextStream
from ssd_runtime.engine.scheduler import Scheduler
from ssd_runtime.engine.turn import RunSettings, Turn, naming
from ssd_runtime.loading.loaded_model import LoadedModel, conversation
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.planning.plan import PlainPlanner
from ssd_runtime.planning.strategy import MakePlanner
from ssd_runtime.sequence.session import Session


@dataclass
class Runner:
    """A loaded model with a strategy; `write` receives text as it comes."""

    loaded: LoadedModel
    decoder: Decoder
    make_planner: MakePlanner
    settings: RunSettings
    write: Callable[[str], None] | None
    _turns: int = 0
    """Turns of the prompts so far, including those that failed or were skipped."""

    @cached_property
    def scheduler(self) -> Scheduler:
        """A scheduler of one prompt at a time, which keeps the prefix of a conversation's next turn."""
        return Scheduler(self.decoder, 1)

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
        return Turn.encode(self.loaded, self.settings, prompt, messages, place=place, number=number)

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
                generation = self.scheduler.finish(turn.start(self.scheduler, self.make_planner(), stream.feed))
        stream.close()
        return turn.outcome(generation, plain, divergence)

    def _both(self, turn: Turn) -> tuple[Generation, Generation, Divergence | None]:
        """Decode with the strategy and plainly after one prefill, each first for every other turn.

        Returns both generations and their difference.
        """
        session = Session(self.decoder, turn.sampling)
        limits = turn.limits
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
    return [message for text in following for message in (outcome.message, ("user", text))]
