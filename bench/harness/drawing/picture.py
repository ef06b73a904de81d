"""Pictures on the page of `bench.papers`."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

SHOWN = "pictures"
"""Folder of the pictures beside the page."""


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture that a part of the page draws and the page shows."""

    drawn: str
    """Path below the folder of results, without suffix."""
    name: str
    """File name beside the page, without suffix."""
    shows: str
    """A sentence below the picture that says what to see."""

    def publish(self, folder: Path, page: Path) -> None:
        """Copy the picture beside `page`, if it was drawn; without matplotlib it is not."""
        if self._source(folder).is_file():
            (page.parent / SHOWN).mkdir(exist_ok=True)
            shutil.copyfile(self._source(folder), page.parent / SHOWN / f"{self.name}.png")

    def markdown(self, page: Path) -> str | None:
        """Markdown that shows the picture beside `page`; None if it was never drawn."""
        shown = f"{SHOWN}/{self.name}.png"
        return f"![{self.shows}]({shown})\n\n*{self.shows}*\n" if (page.parent / shown).is_file() else None

    def _source(self, folder: Path) -> Path:
        return folder / f"{self.drawn}.png"
