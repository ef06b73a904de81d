"""What depends on the context length and is worked out again as that grows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

Value = TypeVar("Value")
LEAST_GROWTH = 64
"""Tokens by which the context has grown at least before anything is worked out again."""


class ByContext(Generic[Value]):
    """The latest value, until the context has grown by `LEAST_GROWTH` tokens and by the factor `growth`."""

    def __init__(self, work_out: Callable[[int], Value], growth: float = 1.0) -> None:
        self._work_out, self._growth = work_out, growth
        self._known: tuple[int, Value] | None = None
        """Up to which context length, and the value."""

    def at(self, context: int) -> Value:
        """The value for about this context length."""
        if self._known is None or context >= self._known[0]:
            until = max(int(context * self._growth), context + LEAST_GROWTH)
            self._known = until, self._work_out(context)
        return self._known[1]
