"""Answers that go on after a break: what the client has of a stream whose server is gone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ssd_runtime.engine.output.text_stream import TextStream

if TYPE_CHECKING:
    # A router reads resumptions without a model.
    from ssd_runtime.loading.models import LoadedModel
    from ssd_runtime.serving.http.tickets import Order

RESUMPTION = "ssd.resumption"
"""Key of an ASGI scope with the `Resumption` of its request. No client can set it: it is not part of HTTP."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToldChoice:
    """The part of a choice that the client has."""

    tokens: tuple[int, ...] = ()
    ended: bool = False
    """Whether the client knows why the choice ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """A broken stream: its answer's id and time, and what the client has of every choice, by index.

    The request that is sent again must have the seed of the first one.
    """

    id: str
    created: int
    choices: Mapping[int, ToldChoice] = field(default_factory=dict)

    def orders(self, orders: Sequence[Order]) -> list[Order]:
        """The orders, which go on after the tokens that the client has."""
        return [self._after(order, self.choices.get(place)) for place, order in enumerate(orders)]

    def texts(self, orders: Sequence[Order], loaded: LoadedModel) -> dict[int, str]:
        """The text that the client has of each choice, by place."""
        return {
            place: TextStream(loaded.decode, orders[place].settings.stops, lambda _: None).skip(told.tokens)
            for place, told in self.choices.items()
            if place < len(orders)
        }

    def _after(self, order: Order, told: ToldChoice | None) -> Order:
        if told is None:
            return order
        if order.logprobs is not None:
            order.logprobs.skip(len(told.tokens))
        return replace(order, answered=told.tokens)
