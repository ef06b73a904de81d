"""Entries of the commands. Ctrl-C while their modules are imported ends with one line, as it does later."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def starting() -> Iterator[None]:
    """Let Ctrl-C end the process within, unless the shell has it ignored."""
    # An exception would be raised in whatever is being imported, and libraries catch some.
    if taken := signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupted)
    yield
    if taken:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _interrupted(*_: object) -> None:
    os.write(2, b"error: interrupted\n")
    os._exit(130)


def run() -> None:
    """Run `ssd-run`."""
    with starting():
        from ssd_runtime.commands.run import main
    main()


def serve() -> None:
    """Run `ssd-serve`."""
    with starting():
        from ssd_runtime.commands.serve import main
    main()
