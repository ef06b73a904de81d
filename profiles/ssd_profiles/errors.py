"""The one kind of error that is a user's to mend, and how a file's schema words one."""

from __future__ import annotations

from pydantic import ValidationError

MAX_PLACE = 100
"""Characters of a place in a file that an error quotes: a crafted key may be much longer."""


class UserError(Exception):
    """Bad input. The message says what is wrong, where, and what to do. Commands exit 2 on it.

    The message is always one line: line breaks, which a file name or a key may hold, become spaces.
    """

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


def first_problem(error: ValidationError) -> str:
    """The first thing that a file's schema rejects, as `place: what is wrong`."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    place = ".".join(str(part) for part in first["loc"])[:MAX_PLACE]
    problem = first["msg"].removeprefix("Value error, ")
    return f"{place}: {problem}" if place else problem
