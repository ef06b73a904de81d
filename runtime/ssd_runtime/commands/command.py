"""The parts that all commands share: help, and exit codes: 2 with one line for bad input, 130 for Ctrl-C."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from io import TextIOWrapper
from typing import Any

import typer

from ssd_profiles.errors import UserError
from ssd_profiles.printable import printable

# Some versions of Typer bundle their own click, so the exceptions are found by their common base class.
_USAGE_ERROR: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
BAD_INPUT = 2
INTERRUPTED = 130
CLOSED_OUTPUT = 141
"""Exit code when the reader of standard output has left: that of a process that SIGPIPE ended."""
EXIT_CODES = "Exit codes: 0 success, 2 bad input, 130 interrupted."


class ClosedOutputError(Exception):
    """Raised when the reader of the output has left, in place of BrokenPipeError, which Typer handles by itself."""


def command_app(**settings: Any) -> typer.Typer:
    """Make a typer app with help in panels and shell completion. `settings` are those of `typer.Typer`."""
    return typer.Typer(rich_markup_mode="rich", pretty_exceptions_enable=False, **settings)


def closing(*examples: str, codes: str = EXIT_CODES) -> str:
    """The text under a command's help: one example per line, `what: command`, then the exit codes."""
    # rich reads brackets as markup
    return "\n".join(each.replace("[", r"\[") for each in examples) + f"\n\n{codes}"


@contextmanager
def uncollected() -> Iterator[None]:
    """Let Python look for no garbage within, and never among what is there at the end.

    Imports and models are millions of objects that stay. To look through them takes a sixth of a start, two seconds of
    every exit, and time within steps.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def run_command(app: typer.Typer) -> None:
    """Run a typer app and exit."""
    command: Any = typer.main.get_command(app)
    command.invoke = _noticing_closed_output(command.invoke)
    # Outside standalone mode Typer raises usage errors instead of printing them, and turns Ctrl-C into an exit code.
    run_guarded(partial(command.main, standalone_mode=False))


def _noticing_closed_output(invoke: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Keep a BrokenPipeError from Typer, which would exit with 1: the code of an output that differs."""

    def guarded(context: Any) -> Any:
        try:
            return invoke(context)
        except BrokenPipeError:
            raise ClosedOutputError from None

    return guarded


def run_guarded(work: Callable[[], object]) -> None:
    """Run `work` and exit with the number that it returns, else 0.

    A UserError, usage error or OSError ends with one line and exit code 2.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # whoever started this process has closed it
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - it stays open as long as the process
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # answers have characters that some terminals lack
    try:
        code = work()
        # What is still buffered may find that the reader has left.
        sys.stdout.flush()
    except UserError as error:
        code = complain(str(error))
    except (typer.Abort, KeyboardInterrupt):
        code = INTERRUPTED
    except _USAGE_ERROR as error:
        # Of a command group without arguments, Typer has printed the help.
        helped = type(error).__name__ == "NoArgsIsHelpError"
        code = BAD_INPUT if helped else complain(_sentence(error.format_message()) + " See --help.")
    except (BrokenPipeError, ClosedOutputError, SystemExit) as error:
        # rich, which prints help and tables, turns the first into the last, with the code of outputs that differ.
        if isinstance(error, SystemExit) and not isinstance(error.__context__, BrokenPipeError):
            raise
        # Whoever read the output has enough, as `head` has. What is still buffered must not fail at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = CLOSED_OUTPUT
    except OSError as error:
        where = f"{error.filename or 'output'}: "
        code = complain(f"{where}{error.strerror or error}; check the path, its permissions and the space left")
    if code == INTERRUPTED:
        complain("interrupted")
    sys.exit(code if isinstance(code, int) else 0)


def _sentence(text: str) -> str:
    return text if text.endswith(("?", ".")) else f"{text}."


def complain(message: str) -> int:
    """Print an error as one line on standard error. Returns the exit code for bad input."""
    print(f"error: {printable(message)}", file=sys.stderr)
    return BAD_INPUT
