"""A reporter for tests of compiles."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

from ssd_compiler.progress import Reporter, Tick


class Notes(Reporter):
    """Keeps what is said, and counts steps of stages."""

    def __init__(self) -> None:
        super().__init__(Console(quiet=True))
        self.lines: list[str] = []
        self.ticks = 0

    def note(self, text: str) -> None:
        self.lines.append(text)

    def warn(self, text: str) -> None:
        self.lines.append(f"warning: {text}")

    @contextmanager
    def stage(self, title: str, total: int | None) -> Iterator[Tick]:
        def tick() -> None:
            self.ticks += 1

        yield tick
