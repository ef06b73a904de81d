"""Actors of a crew beside its workers. Their processes import this file, and so no torch, which takes seconds."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from ssd_compiler.crew.progress_display import Event


class EventQueue:
    """Collects the events of workers."""

    def __init__(self) -> None:
        self._events: list[Event] = []

    def add(self, event: Event) -> None:
        """Add an event."""
        self._events.append(event)

    def take(self) -> Sequence[Event]:
        """Return and forget the events so far."""
        events = self._events
        self._events = []
        return events


class EventSender:
    """Sends events from a worker's process, without waiting."""

    def __init__(self, queue: Any) -> None:
        """`queue` is the handle of an `EventQueue`."""
        self._queue = queue

    def __call__(self, event: Event) -> None:
        """Send an event."""
        self._queue.add.remote(event)


class Slot:
    """Holds a host's slot, which it was started with."""

    def hold(self) -> int:
        """Return the process that holds it."""
        return os.getpid()
