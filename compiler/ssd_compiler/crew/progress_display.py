"""The progress of all workers in one place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from ssd_compiler.progress import Reporter


@dataclass(frozen=True, slots=True)
class Event:
    """A report of a worker about a stage, or a line for the user."""

    worker: str
    kind: Literal["note", "warning", "begin", "steps", "end"]
    text: str
    total: int | None = None
    """Number of steps of the stage in its first event, None if unknown; in later events, the steps so far."""
    seconds: float = 0.0


class ProgressDisplay(Progress):
    """Shows a bar per worker, or without a terminal one line per stage that has ended."""

    def __init__(self, reporter: Reporter) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        super().__init__(*columns, console=reporter.console, disable=not reporter.console.is_terminal)
        self._reporter = reporter
        self._bars: dict[str, TaskID] = {}

    def show(self, events: Sequence[Event]) -> None:
        """Show the events of workers."""
        for event in events:
            if event.kind == "note":
                self._reporter.note(event.text)
            elif event.kind == "warning":
                self._reporter.warn(event.text)
            elif not self.disable:
                self._move(event)
            elif event.kind == "end":
                self._reporter.note(f"{event.text}: {event.seconds:.0f} s, {event.worker}")

    def _move(self, event: Event) -> None:
        """Move the bar of a worker's stage, which has as many steps as it took in the end."""
        if event.kind == "begin":
            self._bars[event.worker] = self.add_task(f"{event.text} ({event.worker})", total=event.total)
        elif event.worker in self._bars:
            bar = self._bars[event.worker]
            if event.kind == "steps":
                self.update(bar, completed=event.total)
            else:
                total = max(self.tasks[self.task_ids.index(bar)].total or 0.0, 1.0)
                self.update(bar, total=total, completed=total)
