"""The interface of the parts of docs/papers.md, whichever way they are measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from bench.fixtures.bundles import MadeBundle
from bench.harness.drawing.picture import Picture
from bench.harness.outcomes import Outcome


class Part(Protocol):
    """A comparison of strategies, or a measurement by another tool."""

    @property
    def name(self) -> str:
        """Its name for `--only`."""

    @property
    def title(self) -> str:
        """The heading of its section."""

    @property
    def bundle(self) -> MadeBundle:
        """The bundle that it examines, or from whose model it starts."""

    @property
    def optional(self) -> bool:
        """Whether the quick mode leaves it out."""

    @property
    def without_bundle(self) -> bool:
        """Whether it needs the bundle's model alone."""

    @property
    def pictures(self) -> Sequence[Picture]:
        """Pictures that it draws."""

    def measure(self, folder: Path, full: bool, packages: str) -> Outcome:
        """Measure it, with unfinished work in `folder`. Exits where a tool fails."""

    def restore(self, outcome: Outcome, folder: Path) -> None:
        """Put an earlier outcome where other tools read it."""

    def is_current(self, outcome: Outcome) -> bool:
        """Whether an outcome is of these contenders or arguments, and of this bundle."""

    def section(self, outcome: Outcome) -> str:
        """The body of its section of the page."""

    def outcome_name(self, full: bool) -> str:
        """The name of its outcome."""
