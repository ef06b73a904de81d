"""Ctrl-C between two steps, never within one."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import current_thread, main_thread
from types import FrameType
from typing import Any


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Let Ctrl-C take effect after the block, so that no sequence and no memory is left half-way.

    A second Ctrl-C takes effect at once. A handler that the program has installed itself is left alone.
    """
    if current_thread() is not main_thread() or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    interrupt = FirstInterrupt()
    try:
        with handling(interrupt, [signal.SIGINT]):
            yield
    finally:
        if interrupt.pressed:
            raise KeyboardInterrupt


class FirstInterrupt:
    """A handler of Ctrl-C that notes the first one; a second one takes effect at once."""

    pressed = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle Ctrl-C."""
        if self.pressed:
            raise KeyboardInterrupt
        self.pressed = True


@contextmanager
def handling(handler: Any, kinds: Sequence[int] = (signal.SIGINT, signal.SIGTERM)) -> Iterator[None]:
    """Let a handler take signals for the length of a block."""
    before = {kind: signal.signal(kind, handler) for kind in kinds}
    try:
        yield
    finally:
        for kind, former in before.items():
            signal.signal(kind, former)
