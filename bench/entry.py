"""How these tools end: as the commands do, in one line and with exit code 2 where what they were given is wrong."""

from __future__ import annotations

import sys
from collections.abc import Callable

from ssd_profiles.errors import UserError

BAD_INPUT = 2


def run_tool(main: Callable[[], None]) -> None:
    """Run a tool's `main`."""
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(BAD_INPUT)
