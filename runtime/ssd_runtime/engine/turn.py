"""One turn of a prompt with its settings: what an engine, a runner and a chat decode."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

from ssd_profiles.errors import UserError
from ssd_profiles.prompts import Prompt
from ssd_runtime.engine.job import Job
from ssd_runtime.engine.loop import generating
from ssd_runtime.engine.observed import Observation
from ssd_runtime.engine.output.channels import said
from ssd_runtime.engine.output.divergence import Divergence
from ssd_runtime.engine.output.generation import Generation
from ssd_runtime.engine.output.output import Limits
from ssd_runtime.engine.output.result import Outcome
from ssd_runtime.engine.output.text_stream import cut_at_stop, stop_condition
from ssd_runtime.engine.scheduler import Scheduler
from ssd_runtime.loading.loaded_model import LoadedModel
from ssd_runtime.planning.plan import Planner
from ssd_runtime.sampling.params import GREEDY, SamplingParams
from ssd_runtime.structure.structure import Structure


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

    structure: Structure | None = None
    """The shape that answers are held to; None for free text."""

    def __post_init__(self) -> None:
        if isinstance(self.stops, str):  # its characters would be stops
            raise UserError("stops: expected several texts, got one; give (text,)")
        if not all(self.stops):
            raise UserError("stops: an empty text would end every answer at once; omit it")

    def of_prompt(self, number: int) -> RunSettings:
        """The settings of one prompt among several, counted from 0: with a seed of its own."""
        return replace(self, sampling=replace(self.sampling, seed=self.sampling.seed + number))


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One turn of a prompt, ready to be decoded."""

    loaded: LoadedModel
    settings: RunSettings
    prompt: Prompt
    ids: list[int]
    place: int = 0
    """Place among the prompt's turns, from 0."""
    number: int = 0
    """Number among the turns of all prompts, from 0; it shifts the seed."""

    @classmethod
    def encode(
        cls,
        loaded: LoadedModel,
        settings: RunSettings,
        prompt: Prompt,
        messages: Sequence[tuple[str, str]],
        place: int = 0,
        number: int = 0,
    ) -> Turn:
        """Encode the messages up to a turn. Raises UserError if the chat template refuses them."""
        with naming(prompt):
            ids = loaded.encode(list(messages), settings.raw)
        return cls(loaded=loaded, settings=settings, prompt=prompt, ids=ids, place=place, number=number)

    @property
    def sampling(self) -> SamplingParams:
        """The sampling with the turn's seed and grammar, and with the model's own penalty by default.

        Tokens that the model's generation config suppresses are never chosen.

        Raises StructureError if the structure cannot be honoured.
        """
        asked = self.settings.of_prompt(self.number).sampling
        own = self.loaded.greedy
        penalty = own.repetition_penalty if asked.repetition_penalty is None else asked.repetition_penalty
        structure = self.settings.structure
        grammar = asked.grammar if structure is None else self.loaded.grammars.compiled(structure)
        return replace(
            asked,
            repetition_penalty=penalty,
            suppress_tokens=self.loaded.in_vocabulary(asked.suppress_tokens) + own.suppress_tokens,
            grammar=grammar,
        )

    @property
    def limits(self) -> Limits:
        """The limits of the answer, by the settings and the model."""
        stops = self.settings.stops
        # Control tokens have no text in answers, so that their names are stops by id as well.
        control = self.loaded.prompts.control
        ends = self.loaded.eos_ids | {control[text] for text in stops if text in control}
        stop = stop_condition(self.loaded.decode, stops)
        grammar = self.sampling.grammar
        if grammar is not None:
            # The end token of an answer that is complete would cost a step.
            completes = grammar.matcher().completes
            own = stop
            stop = completes if own is None else lambda tokens: completes(tokens) or own(tokens)
        return Limits(self.settings.max_new_tokens, ends, stop)

    def start(
        self,
        scheduler: Scheduler,
        planner: Planner,
        on_tokens: Callable[[list[int]], None] | None = None,
        on_cycle: Callable[[Observation], None] | None = None,
        owner: str = "",
        answered: Sequence[int] = (),
        limits: Limits | None = None,
    ) -> Job[Generation]:
        """Queue the turn; `owner` names the stream of its prefixes, and `limits` are the turn's by default.

        `answered` are the first tokens of its answer, where an earlier run has chosen them.
        """
        session = scheduler.session(self.sampling, owner)
        work = generating(
            session=session,
            prompt_ids=self.ids,
            planner=planner,
            limits=limits or self.limits,
            on_tokens=on_tokens,
            on_cycle=on_cycle,
            answered=answered,
        )
        return scheduler.add(session, work, [*self.ids, *answered])

    def outcome(
        self, generation: Generation, plain: Generation | None = None, divergence: Divergence | None = None
    ) -> Outcome:
        """The outcome, once the turn has been decoded."""
        text = cut_at_stop(self.loaded.decode(generation.token_ids), self.settings.stops)
        return Outcome(
            prompt=self.prompt,
            turn=self.place,
            strategy=self.settings.strategy,
            generation=generation,
            text=text,
            plain=plain,
            divergence=divergence,
            seed=self.sampling.seed if self.sampling.random else None,
            said=said(text) if self.loaded.has_channels else None,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One prompt with its own settings; `Engine.step` advances it."""

    turn: Turn
    job: Job[Generation]

    @property
    def done(self) -> bool:
        """Whether it has ended, failed or been cancelled."""
        return self.job.done

    def outcome(self) -> Outcome:
        """The answer with its figures, once the request is done. Raises the UserError that it failed with."""
        with naming(self.turn.prompt):
            return self.turn.outcome(self.job.ended())


@contextmanager
def naming(prompt: Prompt) -> Iterator[None]:
    """Add the prompt's id to a UserError that the block raises."""
    try:
        yield
    except UserError as error:
        raise type(error)(f"prompt {prompt.id}: {str(error).removeprefix('prompt: ')}") from None
