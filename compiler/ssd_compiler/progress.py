"""What a compile tells the user while it works, on standard error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class Reporter:
    """Stages with a bar each, notes and warnings."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True, highlight=False)

    def note(self, text: str) -> None:
        """Something worth knowing."""
        self.console.print(text, markup=False)

    def warn(self, text: str) -> None:
        """Something the user may want to change."""
        self.console.print(f"warning: {text}", style="yellow", markup=False)

    @contextmanager
    def stage(self, title: str, total: int | None) -> Iterator[Callable[[], None]]:
        """Show a bar for a stage of `total` steps; the value is called behind each."""
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self.console, transient=not self.console.is_terminal) as progress:
            task = progress.add_task(title, total=total)
            yield lambda: progress.advance(task)
        if not self.console.is_terminal:
            elapsed = progress.tasks[0].elapsed or 0.0
            self.note(f"{title}: {elapsed:.0f} s")
