"""The error type for mistakes that the user can fix, and the wording of common ones."""

from __future__ import annotations

from importlib.util import find_spec

from pydantic import ValidationError

from ssd_profiles.printable import printable

MAX_PLACE = 100
"""Most characters of a field path that an error quotes: a crafted key may be much longer."""
MAX_LINE = 200
"""Most characters of another program's message that an error quotes."""
MAX_MESSAGE = 2000
"""Most characters of a message, which may quote texts of any length from a file."""


class UserError(Exception):
    """Bad input. The message says what is wrong, where, and what to do; commands exit 2 on it.

    It is one line of printable text: a file name or a key that the message quotes may contain line breaks and terminal
    escapes. The middle of a message that is too long is left out, since where and what to do are at its ends.
    """

    def __init__(self, message: str) -> None:
        half = MAX_MESSAGE // 2
        cut = message if len(message) <= MAX_MESSAGE else f"{message[: half - 1]}…{message[-half:]}"
        super().__init__(printable(cut))


def first_line(error: BaseException) -> str:
    """The first line of an error's message, at most 200 characters; its class name if the message is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:MAX_LINE]


def first_problem(error: ValidationError) -> str:
    """Format the first violation of a file's schema as `place: what is wrong`."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    place = ".".join(str(part) for part in first["loc"])[:MAX_PLACE]
    problem = first["msg"].removeprefix("Value error, ")
    return f"{place}: {problem}" if place else problem


def require_packages(command: str, extra: str, *modules: str) -> None:
    """Raise UserError that says what to install if modules of an optional extra are missing."""
    if missing := [module for module in modules if find_spec(module) is None]:
        raise UserError(
            f"{command}: {' and '.join(missing)} cannot be imported; pip install '.[{extra}]' in a clone brings what "
            "is missing"
        )
