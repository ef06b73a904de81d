"""Shared ends of all commands: one line and exit code 2 for a user's mistake, 130 for Ctrl-C."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import typer

from ssd_artifacts.manifest import tool_version
from ssd_profiles.errors import UserError

# Some versions of Typer bundle their own click, so the exceptions are found by their common base class.
_USAGE_ERROR: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
BAD_INPUT = 2
INTERRUPTED = 130
DTYPE_HELP = "fp32, bf16, fp16, or auto: of fp32 and bf16 the one that decodes faster here."
WEIGHTS_HELP = "packed keeps a .gguf file's weights quantised; dense, the default, makes them fp32."
DRAFT_BITS_HELP = "Bits of lighter copies of the weights, for drafts alone: auto, 8, 4 or none."
WEIGHT_MEMORY_HELP = "Memory for weights packed for the processor, e.g. 2G or 0; by default half of what is free."


def _show_version(asked: bool) -> None:
    if asked:
        print(f"ssd-decoding {tool_version()}")
        raise typer.Exit


VersionOption = Annotated[
    bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
]
"""The option `--version`, as the type of a parameter that the command itself does not use."""


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


def read_size(text: str | None) -> int | None:
    """Parse `--weight-memory` into bytes; None stays None. Raises UserError when it is not a size."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)(?:i?B)?", text, re.IGNORECASE)
    if not match:
        raise UserError(f"--weight-memory: expected a size such as 2G, 500M or 0, got {text!r}")
    return int(float(match[1]) * 1024 ** " KMGT".index(match[2].upper() or " "))


def complain(message: str) -> int:
    """Print an error as one line on standard error. Returns the exit code for bad input."""
    print(f"error: {one_line(message)}", file=sys.stderr)
    return BAD_INPUT


def one_line(message: str) -> str:
    """Collapse every run of white space in the message into one space."""
    return " ".join(message.split())
