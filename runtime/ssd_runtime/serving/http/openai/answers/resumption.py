"""Answers that go on after a break: what the client has of a stream whose server is gone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ssd_runtime.engine.output.text_stream import TextStream

if TYPE_CHECKING:
    # A router reads resumptions without a model.
    from ssd_runtime.loading.loaded_model import LoadedModel
    from ssd_runtime.serving.http.pending import GenerationRequest

RESUMPTION = "ssd.resumption"
"""Key of an ASGI scope with the `Resumption` of its request. No client can set it: it is not part of HTTP."""


@dataclass(slots=True, kw_only=True)
class DeliveredChoice:
    """The part of a choice that the client has."""

    tokens: list[int] = field(default_factory=list)
    ended: bool = False
    """Whether the client knows why the choice ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """A broken stream: its answer's id and time, and what the client has of every choice, by index.

    The request that is sent again must have the seed of the first one.
    """

    id: str
    created: int
    choices: dict[int, DeliveredChoice] = field(default_factory=dict)

    def requests(self, requests: Sequence[GenerationRequest]) -> list[GenerationRequest]:
        """The requests, which go on after the tokens that the client has."""
        found = list(requests)
        for place, delivered in self.choices.items():
            if place < len(found):
                found[place] = replace(found[place], answered=tuple(delivered.tokens))
                if (recorder := found[place].logprobs) is not None:
                    recorder.skip(len(delivered.tokens))
        return found

    def texts(self, requests: Sequence[GenerationRequest], loaded: LoadedModel) -> dict[int, str]:
        """The text that the client has of each choice, by place."""
        return {
            place: TextStream(loaded.decode, requests[place].settings.stops, lambda _: None).skip(delivered.tokens)
            for place, delivered in self.choices.items()
            if place < len(requests)
        }
