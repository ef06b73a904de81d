"""Decodes a user's prompts one after another with a strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ssd_profiles.errors import UserError
from ssd_profiles.prompts import Prompt
from ssd_runtime.decoder import Decoder
from ssd_runtime.divergence import compare
from ssd_runtime.generate import Generation, Limits, decode, generate
from ssd_runtime.models import LoadedModel, conversation
from ssd_runtime.outcome import Outcome
from ssd_runtime.planning.plan import PlainPlanner
from ssd_runtime.planning.strategy import MakePlanner
from ssd_runtime.session import Session
from ssd_runtime.text import TextStream, cut_at_stop, stop_condition


@dataclass(frozen=True, slots=True)
class RunSettings:
    """How prompts are decoded."""

    strategy: str
    max_new_tokens: int
    stops: tuple[str, ...] = ()
    raw: bool = False
    compare: bool = False


@dataclass(slots=True)
class Runner:
    """A loaded model with a strategy; `write` receives text as it comes."""

    loaded: LoadedModel
    decoder: Decoder
    make_planner: MakePlanner
    settings: RunSettings
    write: Callable[[str], None]
    _decoded: int = field(default=0)

    def run(self, prompt: Prompt) -> Iterator[Outcome]:
        """Decode a prompt, turn by turn; each turn sees the answers before it."""
        messages = conversation(prompt)
        outcome = self._turn(prompt, 0, messages)
        yield outcome
        for turn, text in enumerate(prompt.turns[1:], start=1):
            messages += [("assistant", outcome.text), ("user", text)]
            outcome = self._turn(prompt, turn, messages)
            yield outcome

    def _turn(self, prompt: Prompt, turn: int, messages: list[tuple[str, str]]) -> Outcome:
        settings, session = self.settings, Session(self.decoder)
        limits = Limits(
            settings.max_new_tokens, self.loaded.eos_ids, stop_condition(self.loaded.decode, settings.stops)
        )
        stream = TextStream(self.loaded.decode, settings.stops, self.write)
        try:
            ids = self.loaded.encode(messages, settings.raw)
            if settings.compare:
                outcome = self._both(session, prompt, turn, ids, limits)
                stream.feed(outcome.generation.token_ids)
            else:
                generation = generate(session, ids, self.make_planner(), limits, stream.feed)
                outcome = Outcome(prompt, turn, settings.strategy, generation, self._text(generation))
        except UserError as error:
            raise UserError(f"prompt {prompt.id}: {str(error).removeprefix('prompt: ')}") from None
        stream.close()
        self._decoded += 1
        return outcome

    def _both(self, session: Session, prompt: Prompt, turn: int, ids: list[int], limits: Limits) -> Outcome:
        """Plain decoding and the strategy behind one prefill; who goes first alternates."""
        first = generate(session, ids, PlainPlanner(), Limits(1))  # the prefill, timed, and a warm-up
        prefilled = session.prefill(ids)
        runs: dict[str, Generation] = {}
        for name in ("plain", "strategy") if self._decoded % 2 else ("strategy", "plain"):
            planner = PlainPlanner() if name == "plain" else self.make_planner()
            runs[name] = decode(session, prefilled, planner, limits, prefill_seconds=first.prefill_seconds)
        plain, generation = runs["plain"], runs["strategy"]
        difference = compare(session, ids, plain.token_ids, generation.token_ids)
        return Outcome(prompt, turn, self.settings.strategy, generation, self._text(generation), plain, difference)

    def _text(self, generation: Generation) -> str:
        return cut_at_stop(self.loaded.decode(generation.token_ids), self.settings.stops)
