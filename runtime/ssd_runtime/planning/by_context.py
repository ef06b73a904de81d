"""Caches a value that depends on the context length until the context has grown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

Value = TypeVar("Value")
LEAST_GROWTH = 64
"""Least growth of the context, in tokens, before a value is computed again."""


class ByContext(Generic[Value]):
    """The latest value, until the context has grown by `LEAST_GROWTH` tokens and by the factor `growth`."""

    def __init__(self, compute: Callable[[int], Value], growth: float = 1.0) -> None:
        self._compute = compute
        self._growth = growth
        self._known: tuple[int, Value] | None = None
        """The context length from which the value is computed again, and the value."""

    def at(self, context: int) -> Value:
        """The value for about this context length."""
        if self._known is None or context >= self._known[0]:
            until = max(int(context * self._growth), context + LEAST_GROWTH)
            self._known = until, self._compute(context)
        return self._known[1]
