"""The pictures of `bench.papers`' page: a part of it draws them, the page shows them."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

SHOWN = "pictures"
"""Their folder, beside the page."""


@dataclass(frozen=True, slots=True)
class Picture:
    """One of them."""

    drawn: str
    """Below the folder of outcomes, without its ending."""
    name: str
    """On the page."""
    shows: str

    def publish(self, folder: Path, page: Path) -> None:
        """Copy it beside `page`, where it has been drawn: without matplotlib none is."""
        if self._source(folder).is_file():
            (page.parent / SHOWN).mkdir(exist_ok=True)
            shutil.copyfile(self._source(folder), page.parent / SHOWN / f"{self.name}.png")

    def markdown(self, folder: Path) -> str | None:
        """As the page shows it; None where it has not been drawn."""
        return f"![{self.shows}]({SHOWN}/{self.name}.png)\n" if self._source(folder).is_file() else None

    def _source(self, folder: Path) -> Path:
        return folder / f"{self.drawn}.png"
