"""The new tokens of a request so far, and the limits that end them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ssd_profiles.errors import UserError
from ssd_runtime.engine.output.generation import FinishReason


@dataclass(frozen=True, slots=True)
class Limits:
    """The end of a generation: `max_new_tokens`, an end-of-sequence token, or `stop`, whichever comes first."""

    max_new_tokens: int
    eos_ids: frozenset[int] = frozenset()
    stop: Callable[[Sequence[int]], bool] | None = None
    """Stop condition, called after every new token with all new tokens so far."""

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise UserError(f"max_new_tokens: {self.max_new_tokens} is too few; give 1 or more")


@dataclass(slots=True)
class Output:
    """The new tokens so far, and whether they are complete."""

    tokens: list[int]
    limits: Limits
    most: int
    """Most new tokens, by the limits and the room in the context."""
    finish_reason: FinishReason
    """The reason for the limit `most`, until a stop comes first."""
    done: bool = False

    @classmethod
    def after(cls, tokens: Sequence[int], limits: Limits, room: int) -> Output:
        """An output that begins with `tokens`, in a context that has `room` for new ones."""
        output = cls(
            tokens=[],
            limits=limits,
            most=min(limits.max_new_tokens, room),
            finish_reason="context" if room < limits.max_new_tokens else "length",
        )
        for token in tokens:
            if not output.add(token):
                break
        return output

    @property
    def remaining(self) -> int:
        """Number of new tokens that may still follow."""
        return self.most - len(self.tokens)

    def add(self, token: int) -> bool:
        """Add the next token; returns whether the answer goes on after it."""
        self.tokens.append(token)
        if token in self.limits.eos_ids or (self.limits.stop is not None and self.limits.stop(self.tokens)):
            self.finish_reason = "stop"
            self.done = True
        elif self.remaining <= 0:
            self.done = True
        return not self.done
