"""How both commands end: one line and exit code 2 for a user's mistake, 130 for Ctrl-C."""

from __future__ import annotations

import sys

import click
import typer

from ssd_profiles.errors import UserError


def run_command(app: typer.Typer) -> None:
    """Run a typer app and exit."""
    command = typer.main.get_command(app)
    try:
        code = command.main(standalone_mode=False)
    except UserError as error:
        code = _complain(str(error))
    except click.exceptions.Abort:
        code = _complain("interrupted", 130)
    except KeyboardInterrupt:
        code = _complain("interrupted", 130)
    except click.exceptions.ClickException as error:
        code = _complain(error.format_message())
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        code = _complain(f"{where}{error.strerror or error}; check the path, its permissions and the space left")
    sys.exit(code if isinstance(code, int) else 0)


def _complain(message: str, code: int = 2) -> int:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return code
