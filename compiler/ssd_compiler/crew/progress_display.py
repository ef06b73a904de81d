"""The progress of all workers in one place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from types import TracebackType

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from ssd_compiler.progress import Reporter


class EventKind(Enum):
    """The kinds of a worker's reports."""

    NOTE = "note"
    WARNING = "warning"
    BEGIN = "begin"
    STEPS = "steps"
    END = "end"


@dataclass(frozen=True, slots=True)
class Event:
    """A report of a worker about a stage, or a line for the user."""

    worker: str
    kind: EventKind
    text: str
    total: int | None = None
    """Number of steps of the stage in its first event, None if unknown; in later events, the steps so far."""
    seconds: float = 0.0


class ProgressDisplay:
    """Shows a bar per worker, or without a terminal one line per stage that has ended."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        live = reporter.console.is_terminal
        self._progress = Progress(*columns, console=reporter.console) if live else None
        self._bars: dict[str, TaskID] = {}

    def __enter__(self) -> ProgressDisplay:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def show(self, events: Sequence[Event]) -> None:
        """Show the events of workers."""
        for event in events:
            if event.kind is EventKind.NOTE:
                self._reporter.note(event.text)
            elif event.kind is EventKind.WARNING:
                self._reporter.warn(event.text)
            elif self._progress is not None:
                self._move(self._progress, event)
            elif event.kind is EventKind.END:
                self._reporter.note(f"{event.text}: {event.seconds:.0f} s, {event.worker}")

    def _move(self, progress: Progress, event: Event) -> None:
        """Move the bar of a worker's stage, which has as many steps as it took in the end."""
        if event.kind is EventKind.BEGIN:
            self._bars[event.worker] = progress.add_task(f"{event.text} ({event.worker})", total=event.total)
        elif event.worker in self._bars:
            bar = self._bars[event.worker]
            if event.kind is EventKind.STEPS:
                progress.update(bar, completed=event.total)
            else:
                total = max(progress.tasks[progress.task_ids.index(bar)].total or 0.0, 1.0)
                progress.update(bar, total=total, completed=total)
