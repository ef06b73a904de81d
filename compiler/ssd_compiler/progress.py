"""Progress of a compile, on standard error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class Reporter:
    """Prints stages with progress bars, notes and warnings."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True, highlight=False)

    def note(self, text: str) -> None:
        """Print information."""
        self.console.print(text, markup=False, soft_wrap=True)

    def warn(self, text: str) -> None:
        """Print a warning about something that the user may want to change."""
        self.console.print(f"warning: {text}", style="yellow", markup=False, soft_wrap=True)

    @contextmanager
    def stage(self, title: str, total: int | None) -> Iterator[Callable[[], None]]:
        """Show a progress bar, or without a terminal one line at the end.

        Yields a function to call after each of `total` steps; `total` is None when the number is unknown.
        """
        if not self.console.is_terminal:
            began = perf_counter()
            yield lambda: None
            self.note(f"{title}: {perf_counter() - began:.0f} s")
            return
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self.console) as progress:
            task = progress.add_task(title, total=total)
            yield lambda: progress.advance(task)
            # A stage may end before its bound, or have none.
            done = progress.tasks[0].completed
            progress.update(task, total=max(done, 1), completed=max(done, 1))
