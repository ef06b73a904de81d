"""Shared ends of all commands: one line and exit code 2 for a user's mistake, 130 for Ctrl-C."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import typer

from ssd_profiles.errors import UserError

# Some versions of Typer bundle their own click, so the exceptions are found by their common base class.
_USAGE_ERROR: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
BAD_INPUT = 2
INTERRUPTED = 130


def run_command(app: typer.Typer) -> None:
    """Run a typer app and exit."""
    # Outside standalone mode Typer raises usage errors instead of printing them, and turns Ctrl-C into an exit code.
    run_guarded(partial(typer.main.get_command(app).main, standalone_mode=False))


def run_guarded(work: Callable[[], object]) -> None:
    """Run `work` and exit with the number that it returns, else 0.

    A UserError, usage error or OSError ends with one line and exit code 2.
    """
    try:
        code = work()
    except UserError as error:
        code = complain(str(error))
    except (typer.Abort, KeyboardInterrupt):
        code = INTERRUPTED
    except _USAGE_ERROR as error:
        code = complain(f"{error.format_message()} See --help.")
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        code = complain(f"{where}{error.strerror or error}; check the path, its permissions and the space left")
    if code == INTERRUPTED:
        complain("interrupted")
    sys.exit(code if isinstance(code, int) else 0)


def complain(message: str) -> int:
    """Print an error as one line on standard error. Returns the exit code for bad input."""
    print(f"error: {one_line(message)}", file=sys.stderr)
    return BAD_INPUT


def one_line(message: str) -> str:
    """Collapse every run of white space in the message into one space."""
    return " ".join(message.split())
