"""Actors of a crew beside its workers. Their processes import this file, and so no torch, which takes seconds."""

from __future__ import annotations

import os
from collections.abc import Sequence

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


class Slot:
    """Holds a host's slot, which it was started with."""

    def hold(self) -> int:
        """Return the process that holds it."""
        return os.getpid()
