"""Decodes a user's prompts one after another with a strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

from ssd_profiles.errors import UserError
from ssd_profiles.prompts import Prompt
from ssd_runtime.engine.divergence import Divergence, compare
from ssd_runtime.engine.loop import Generation, Limits, decode, generate
from ssd_runtime.engine.result import Outcome
from ssd_runtime.engine.session import Session
from ssd_runtime.engine.text_stream import TextStream, cut_at_stop, stop_condition
from ssd_runtime.loading.models import LoadedModel, conversation
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.planning.plan import PlainPlanner
from ssd_runtime.planning.strategy import MakePlanner
from ssd_runtime.profiling.memory import guard_memory
from ssd_runtime.sampling.params import GREEDY, SamplingParams

OUT_OF_MEMORY_REMEDY = "give a shorter prompt, fewer new tokens, --weight-memory 0 or --dtype bf16"


@dataclass(frozen=True, slots=True)
class RunSettings:
    """How prompts are decoded."""

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

    def answer(self, text: str) -> Outcome:
        """Decode behind one message of a user's. Raises UserError where it does not fit into the context."""
        return next(self.run(Prompt("1", turns=(text,))))

    def run(self, prompt: Prompt) -> Iterator[Outcome]:
        """Decode a prompt, turn by turn; each turn sees the answers before it.

        Raises UserError where a turn does not fit into the context or the memory, or the chat template refuses it.
        The next prompt can be decoded all the same.
        """
        first = self._turns
        # Counted beforehand: a turn that fails changes no other prompt's seed.
        self._turns += max(1, len(prompt.turns))
        messages = conversation(prompt)
        outcome = self._turn(prompt, 0, messages, first)
        yield outcome
        for turn, text in enumerate(prompt.turns[1:], start=1):
            messages += [("assistant", outcome.text), ("user", text)]
            outcome = self._turn(prompt, turn, messages, first + turn)
            yield outcome

    def _turn(self, prompt: Prompt, turn: int, messages: list[tuple[str, str]], number: int) -> Outcome:
        """Decode a prompt's turn, which is turn `number` of all prompts' turns, from 0."""
        settings, sampling = self.settings, self._sampling(number)
        session = Session(self.decoder, sampling)
        limits = Limits(
            settings.max_new_tokens, self.loaded.eos_ids, stop_condition(self.loaded.decode, settings.stops)
        )
        stream = TextStream(self.loaded.decode, settings.stops, self.write)
        plain: Generation | None = None
        difference: Divergence | None = None
        try:
            ids = self.loaded.encode(messages, settings.raw)
            with guard_memory("decoding", self.decoder.device, OUT_OF_MEMORY_REMEDY):
                if settings.compare:
                    generation, plain, difference = self._both(session, ids, limits, number)
                    stream.feed(generation.token_ids)
                else:
                    generation = generate(session, ids, self.make_planner(), limits, stream.feed)
        except UserError as error:
            raise UserError(f"prompt {prompt.id}: {str(error).removeprefix('prompt: ')}") from None
        stream.close()
        seed = sampling.seed if sampling.random else None
        text = cut_at_stop(self.loaded.decode(generation.token_ids), settings.stops)
        return Outcome(prompt, turn, settings.strategy, generation, text, plain, difference, seed)

    def _sampling(self, number: int) -> SamplingParams:
        """The settings', with the seed of turn `number` and the model's own penalty where they have none."""
        asked = self.settings.sampling
        own = self.loaded.repetition_penalty
        penalty = own if asked.repetition_penalty is None else asked.repetition_penalty
        return replace(asked, seed=asked.seed + number, repetition_penalty=penalty)

    def _both(
        self, session: Session, ids: list[int], limits: Limits, number: int
    ) -> tuple[Generation, Generation, Divergence | None]:
        """Plain decoding and the strategy behind one prefill; who goes first alternates.

        Their outputs are compared unless tests by rejection make them differ.
        """
        first = generate(session, ids, PlainPlanner(), Limits(1))  # the prefill, timed, and a warm-up
        prefilled = session.prefill(ids, new_tokens=limits.max_new_tokens)
        runs: dict[str, Generation] = {}
        for name in ("plain", "strategy") if number % 2 else ("strategy", "plain"):
            planner = PlainPlanner() if name == "plain" else self.make_planner()
            runs[name] = decode(session, prefilled, planner, limits, prefill_seconds=first.prefill_seconds)
        plain, generation = runs["plain"], runs["strategy"]
        if session.sampling.tests_drafts:
            return generation, plain, None
        return generation, plain, compare(session, ids, plain.token_ids, generation.token_ids)
