"""Caches a value that depends on the context length until the context has changed much."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

Value = TypeVar("Value")
LEAST_GROWTH = 64
"""Least change of the context, in tokens, before a value is computed again."""


class ByContext(Generic[Value]):
    """The latest value, until the context has grown by `LEAST_GROWTH` tokens and by the factor `growth`.

    The mean context of several sequences also falls: then until it has fallen by `LEAST_GROWTH` tokens.
    """

    def __init__(self, compute: Callable[[int], Value], growth: float = 1.0) -> None:
        self._compute = compute
        self._growth = growth
        self._known: tuple[range, Value] | None = None
        """The context lengths for which the value is not computed again, and the value."""

    def at(self, context: int) -> Value:
        """The value for about this context length."""
        if self._known is None or context not in self._known[0]:
            until = max(int(context * self._growth), context + LEAST_GROWTH)
            self._known = range(context + 1 - LEAST_GROWTH, until), self._compute(context)
        return self._known[1]
