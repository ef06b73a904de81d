"""Progress of a compile, on standard error."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from ssd_profiles.printable import printable
from ssd_runtime.commands.waiting import REFRESHES_PER_SECOND

Tick = Callable[[], None]
"""Is called after each step of a stage."""
RESUMED_SECONDS = 1.0
"""A domain that took less was taken from an earlier, interrupted compile."""


class Reporter:
    """Prints stages with progress bars, notes and warnings."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True, highlight=False)

    def note(self, text: str) -> None:
        """Print information."""
        self.console.print(printable(text), markup=False, soft_wrap=True)

    def warn(self, text: str) -> None:
        """Print a warning about something that the user may want to change."""
        self.console.print(f"warning: {printable(text)}", style="yellow", markup=False, soft_wrap=True)

    def domains(self, names: Sequence[str], step: str = "") -> Iterator[str]:
        """Yield the names of domains, and print after each one about how long the others will take with this `step`.

        The estimate is the mean time of the domains that were not resumed.
        """
        taken: list[float] = []
        for number, name in enumerate(names, start=1):
            began = perf_counter()
            yield name
            if (seconds := perf_counter() - began) >= RESUMED_SECONDS:
                taken.append(seconds)
            left = len(names) - number
            if left and taken:
                about = left * sum(taken) / len(taken)
                told = f"{number} of {len(names)} domains done, about {duration(about)} left for the others"
                self.note(f"{step}: {told}" if step else told)

    @contextmanager
    def stage(self, title: str, total: int | None) -> Iterator[Tick]:
        """Show a progress bar, or without a terminal one line at the end.

        Yields a function to call after each of `total` steps; `total` is None when the number is unknown.
        """
        if not self.console.is_terminal:
            began = perf_counter()
            yield lambda: None
            self.note(f"{title}: {perf_counter() - began:.0f} s")
            return
        columns = [TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn()]
        columns += [TimeElapsedColumn(), *([TextColumn("left"), TimeRemainingColumn()] if total else [])]
        # Drawing takes time from what a stage measures, so it is rare.
        with Progress(*columns, console=self.console, refresh_per_second=REFRESHES_PER_SECOND) as progress:
            task = progress.add_task(title, total=total)
            yield lambda: progress.advance(task)
            # A stage may end before its bound, or have none.
            done = progress.tasks[0].completed
            progress.update(task, total=max(done, 1), completed=max(done, 1))


def duration(seconds: float) -> str:
    """A time as people say it: seconds below a minute and a half, else minutes."""
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
