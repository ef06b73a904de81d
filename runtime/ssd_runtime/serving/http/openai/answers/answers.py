"""Answers: generation requests are handed to the engine's thread, and its events become JSON."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from uuid import uuid4

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from ssd_artifacts.manifest import tool_version
from ssd_profiles.errors import UserError
from ssd_profiles.printable import printable
from ssd_runtime.devices.memory import OutOfMemoryError
from ssd_runtime.engine.output.result import Outcome, Tally
from ssd_runtime.sampling.finite import NotFiniteError
from ssd_runtime.serving.http.engine_thread import Closing, EngineThread, QueueFull
from ssd_runtime.serving.http.openai.answers.events import Json, json_text
from ssd_runtime.serving.http.openai.answers.forms import Form
from ssd_runtime.serving.http.openai.answers.logprobs import PositionReader
from ssd_runtime.serving.http.openai.answers.origins import OriginReader
from ssd_runtime.serving.http.openai.answers.resumption import Resumption
from ssd_runtime.serving.http.openai.errors import ApiError, too_many_answers
from ssd_runtime.serving.http.openai.requests.prompt_encoder import PromptEncoder
from ssd_runtime.serving.http.openai.requests.requests import CommonRequest, StreamOptions
from ssd_runtime.serving.http.pending import Block, End, GenerationRequest, PendingRequest
from ssd_runtime.structure.structure import StructureError


class Subscription:
    """The events of requests that were submitted together, for a coroutine."""

    def __init__(self, thread: EngineThread, requests: Sequence[GenerationRequest], choices: int = 1) -> None:
        """Submit the requests, `choices` of them for each prompt. Raises ApiError if they are refused."""
        self._thread = thread
        self._events: asyncio.Queue[tuple[int, Block | End]] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def listen(place: int, event: Block | End) -> None:
            loop.call_soon_threadsafe(self._events.put_nowait, (place, event))

        if len(requests) > thread.places:
            raise too_many_answers(len(requests), thread.places, choices)
        try:
            self.pending: list[PendingRequest] = thread.submit(requests, listen)
        except QueueFull as full:
            raise ApiError(429, str(full), code="rate_limit_exceeded", retry_after=full.retry_after) from None
        except Closing as closing:
            raise ApiError(503, str(closing), code="shutting_down", retry_after=1) from None

    async def events(self) -> AsyncIterator[tuple[int, Block | End]]:
        """Yield (place, event) until every request has ended."""
        left = len(self.pending)
        while left:
            place, event = await self._events.get()
            left -= isinstance(event, End)
            yield place, event

    def close(self) -> None:
        """Cancel the requests that have not ended."""
        self._thread.cancel(self.pending)


@dataclass(slots=True)
class _Held:
    """The parts of a choice that its chunks have told."""

    positions: PositionReader
    origins: OriginReader | None = None
    """Reader for clients who ask how tokens were drafted."""
    begin: int = 0
    """Number of tokens that were told."""
    tokens: list[int] = field(default_factory=list)
    """Tokens that no chunk has told yet."""


class Answer:
    """The answer to one request."""

    def __init__(
        self,
        asked: CommonRequest,
        subscription: Subscription,
        form: Form,
        encoder: PromptEncoder,
        model_name: str,
        resumption: Resumption | None = None,
    ) -> None:
        """With a `resumption`, the stream goes on after it."""
        self._asked = asked
        self._stream_options = asked.stream_options or StreamOptions()
        self._subscription = subscription
        self._form = form
        self._encoder = encoder
        self._held: dict[int, _Held] = {}
        """The text that the chunks of a stream have told so far, by choice."""
        self._common: Json = {
            "id": f"{form.prefix}{uuid4().hex}",
            "created": int(time.time()),
            "model": model_name,
            "system_fingerprint": f"ssd-decoding-{tool_version()}",
        }
        self._ended = set[int]()
        """Choices whose end the client knows."""
        if resumption is not None:
            self._common |= {"id": resumption.id, "created": resumption.created}
            self._ended = {place for place, choice in resumption.choices.items() if choice.ended}
            requests = [each.request for each in subscription.pending]
            for place, text in resumption.texts(requests, encoder.loaded).items():
                tokens = resumption.choices[place].tokens
                held = self._hold(place)
                held.begin = len(tokens)
                held.positions.skip(tokens)
                form.block(place, text)  # the client has these choices

    async def outcomes(self) -> list[Outcome]:
        """The outcomes of all requests, once they have ended. Raises ApiError for the first that fails."""
        outcomes: dict[int, Outcome] = {}
        async for place, event in self._subscription.events():
            if isinstance(event, End):
                outcomes[place] = self._outcome(place, event)
        return [outcomes[place] for place in sorted(outcomes)]

    def whole(self, outcomes: Sequence[Outcome]) -> Json:
        """The answer at once."""
        return {**self._about(outcomes), "choices": [*self._whole_choices(outcomes)]}

    def written(self, outcomes: Sequence[Outcome]) -> str:
        """The JSON of the whole answer.

        Other threads run between two choices: the encoder lets none run before it has written its value.
        """
        choices = ",".join(map(json_text, self._whole_choices(outcomes)))
        about = json_text(self._about(outcomes)).removesuffix("}")
        return f'{about},"choices":[{choices}]}}'

    def _about(self, outcomes: Sequence[Outcome]) -> Json:
        """The fields of a whole answer without its choices."""
        return {**self._common, "object": self._form.whole, "usage": self._usage(outcomes)}

    def _whole_choices(self, outcomes: Sequence[Outcome]) -> Iterator[Json]:
        for place, outcome in enumerate(outcomes):
            choice = self._form.choice(place, outcome)
            held = _Held(PositionReader(self._encoder.token_bytes))
            self._tell_tokens(choice, place, outcome.generation.token_ids, held)
            yield choice

    async def chunks(self) -> AsyncIterator[list[Json]]:
        """The chunks of the answer, those that go out together at a time; an error ends it as the last one."""
        outcomes: dict[int, Outcome] = {}
        begun = set(self._held)
        try:
            async for place, event in self._subscription.events():
                if place not in begun and (first := self._form.first(place)) is not None:
                    yield [self._chunk([first])]
                begun.add(place)
                if isinstance(event, Block):
                    choices = self._form.block(place, event.text)
                else:
                    outcomes[place] = self._outcome(place, event)
                    choices = self._form.last(place, outcomes[place]) if place not in self._ended else []
                # The chunks of one event go out together: a stream that breaks has all of them or none.
                described = self._described(place, choices, event)
                if described:
                    yield [self._chunk([choice]) for choice in described]
            if self._stream_options.include_usage:
                yield [self._chunk([], self._usage([outcomes[place] for place in sorted(outcomes)]))]
        except ApiError as error:
            yield [error.to_json()]

    def _hold(self, place: int) -> _Held:
        if place not in self._held:
            pending = self._subscription.pending[place]
            with_origins = self._stream_options.include_drafts
            origins = OriginReader(self._encoder.loaded.decode, pending) if with_origins else None
            self._held[place] = _Held(PositionReader(self._encoder.token_bytes), origins)
        return self._held[place]

    def _described(self, place: int, choices: list[Json], event: Block | End) -> list[Json]:
        """The choices, the first of which tells of new tokens; tokens without a choice wait for one."""
        held = self._hold(place)
        held.tokens += event.tokens
        if held.origins is not None:
            held.origins.read(event.text if isinstance(event, Block) else "", event.tokens, event.origins)
        for choice in choices[:1]:
            self._tell_tokens(choice, place, held.tokens, held)
            if held.origins is not None:
                choice["ssd"] = held.origins.tell()
            held.begin += len(held.tokens)
            held.tokens = []
        return choices

    def _tell_tokens(self, choice: Json, place: int, tokens: Sequence[int], held: _Held) -> None:
        """Add the tokens and their log-probabilities to a choice, if they are wanted."""
        if self._asked.return_token_ids:
            choice["token_ids"] = list(tokens)
        recorder = self._subscription.pending[place].request.logprobs
        if recorder is not None:
            choice["logprobs"] = self._form.logprobs(held.positions.read(recorder.read(held.begin, tokens)))

    def _chunk(self, choices: list[Json], usage: Json | None = None) -> Json:
        """One chunk; if usage comes at the end, the others say that they have none, as OpenAI's do."""
        about = {"usage": usage} if self._stream_options.include_usage else {}
        return {**self._common, "object": self._form.chunk, "choices": choices, **about}

    def _outcome(self, place: int, end: End) -> Outcome:
        """The outcome of a request that has ended. Raises ApiError if it has none."""
        if end.outcome is not None:
            return end.outcome
        raise failure(self._subscription.pending[place], end)

    def _usage(self, outcomes: Sequence[Outcome]) -> Json:
        """Tokens and figures of all choices; a prompt counts once, however many choices it has."""
        generations = [outcome.generation for outcome in outcomes]
        prompts = generations[:: self._asked.n or 1]
        prompt = sum(each.prompt_tokens for each in prompts)
        new = sum(len(each.token_ids) for each in generations)
        cached = sum(each.num_cached_tokens for each in prompts)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": new,
            "total_tokens": prompt + new,
            "prompt_tokens_details": {"cached_tokens": cached},
            "ssd": self._figures(outcomes),
        }

    def _figures(self, outcomes: Sequence[Outcome]) -> Json:
        """Our extension of usage: how the answer was decoded."""
        total = sum((Tally.of(outcome) for outcome in outcomes), Tally())
        figures = total.figures(compare=False)
        del figures["new_tokens"]
        firsts = [first for each in self._subscription.pending if (first := each.seconds_to_first_token) is not None]
        seed = {} if outcomes[0].seed is None else {"seed": outcomes[0].seed}
        return {
            "strategy": outcomes[0].strategy,
            **seed,
            "time_to_first_token": round(min(firsts), 4) if firsts else None,
            **figures,
        }


class EventStream(StreamingResponse):
    """A stream of events, which ends the requests however the response ends."""

    def __init__(self, content: AsyncIterator[str], subscription: Subscription) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(content, media_type="text/event-stream", headers=headers)
        self._subscription = subscription

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._subscription.close()


def failure(pending: PendingRequest, end: End) -> ApiError:
    """The error of a request that ended without an answer."""
    error = end.error
    if isinstance(error, Closing):
        return ApiError(503, str(error), code="shutting_down", retry_after=1)
    if isinstance(error, NotFiniteError):
        return ApiError(500, printable(str(error)), code="model_error")
    if isinstance(error, StructureError):
        return ApiError(400, printable(str(error)), code="invalid_structure")
    if isinstance(error, OutOfMemoryError):
        what = printable(str(error)).partition(";")[0]  # what follows is for whoever starts the server
        return ApiError(503, f"{what}; ask for less, or later", code="out_of_memory", retry_after=1)
    if isinstance(error, UserError):
        return ApiError(400, printable(str(error)), code="invalid_request")
    if end.cancelled:
        return ApiError(499, "the request was cancelled", code="cancelled")
    return ApiError(500, "the request failed by a defect of the server; its log says more", code="internal_error")
