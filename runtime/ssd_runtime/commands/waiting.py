"""Shows on a terminal what a command is waiting for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

REFRESHES_PER_SECOND = 2
"""Few, because drawing takes time from what is measured meanwhile."""


@contextmanager
def waiting(title: str, shown: bool) -> Iterator[None]:
    """Show a spinner with `title` and the elapsed time on standard error until the block ends.

    Nothing is shown unless standard error is a terminal. What the block prints there appears above the spinner.
    """
    with _progress(SpinnerColumn(), _title(), TimeElapsedColumn(), shown=shown) as progress:
        progress.add_task(title, total=None)
        yield


@contextmanager
def counting(title: str, total: int, shown: bool) -> Iterator[Callable[[], None]]:
    """Show a bar of `total` steps and an estimate of the time left; yields a function to call after each step.

    The bar is drawn after each step only, so that decoding is not disturbed in between.
    """
    columns = (
        _title(),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with _progress(*columns, shown=shown, auto_refresh=False) as progress:
        task = progress.add_task(title, total=total)
        progress.refresh()

        def tick() -> None:
            progress.update(task, advance=1, refresh=True)

        yield tick


def _title() -> ProgressColumn:
    return TextColumn("{task.description}", markup=False)


def _progress(*columns: ProgressColumn, shown: bool, auto_refresh: bool = True) -> Progress:
    """A display on standard error that is gone when it ends; hidden outside a terminal."""
    console = Console(stderr=True, highlight=False)
    return Progress(
        *columns,
        console=console,
        transient=True,
        redirect_stdout=False,
        disable=not (shown and console.is_terminal),
        auto_refresh=auto_refresh,
        refresh_per_second=REFRESHES_PER_SECOND,
    )
