"""A measurement for the page of `bench.papers`: another tool of this folder, with its output as the section."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.fixtures.bundles import MadeBundle
from bench.harness.drawing.picture import Picture
from bench.harness.outcomes import Outcome
from bench.harness.provenance import commit
from ssd_runtime.devices.device import device_identity

SHOWN = Path("build/papers")
"""Folder of results in the commands that the page shows."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """A tool with its arguments."""

    name: str
    title: str
    tool: str
    arguments: Sequence[str]
    """Arguments, in which `{out}` stands for the folder of results."""
    bundle: MadeBundle
    """The bundle that it examines, or from whose model it starts."""
    optional: bool = False
    """Whether the quick mode leaves it out."""
    derived: bool = False
    """Whether it only evaluates other parts' results, so that it runs every time."""
    without_bundle: bool = False
    """Whether it needs the bundle's model alone."""
    pictures: Sequence[Picture] = ()

    def command(self, folder: Path) -> str:
        """The command as a user would type it, with outcomes under `folder`."""
        return " ".join(("python -m", self.tool, *self._arguments(folder)))

    def measure(self, folder: Path, full: bool, packages: str) -> Outcome:
        """Run the tool; its output is the outcome. Exits where the tool fails."""
        folder.mkdir(parents=True, exist_ok=True)
        settings = self._settings()
        command = [sys.executable, "-m", self.tool, *self._arguments(folder)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            print(done.stdout, end="")
            sys.exit(done.returncode)
        machine = f"{processor()}, {torch.get_num_threads()} threads, torch {torch.__version__}. "
        bundle = f"Bundle {str(settings['bundle'])[:8]}. " if settings["bundle"] else ""
        return Outcome(
            part=self.outcome_name(full),
            processor=processor(),
            origin=f"{'' if self.derived else machine}{bundle}Command: `{self.command(SHOWN)}`.",
            packages=packages,
            commit=commit(),
            settings=settings,
            printed=done.stdout.rstrip(),
        )

    def restore(self, outcome: Outcome, folder: Path) -> None:
        """Do nothing: no other tool reads what this one prints."""

    def is_current(self, outcome: Outcome) -> bool:
        """Whether an outcome is of these arguments and this bundle."""
        return not self.derived and outcome.settings == self._settings()

    def section(self, outcome: Outcome) -> str:
        """The body of its section of the page."""
        if outcome.packages is None or not outcome.printed:
            return outcome.printed
        return f"```text\n{outcome.printed}\n```\n"

    def outcome_name(self, full: bool) -> str:
        """The name of its outcome, the same in both modes."""
        return self.name

    def _settings(self) -> dict[str, object]:
        reads_bundle = not self.without_bundle and self.bundle.path in self.arguments
        bundle = self.bundle.digest() if reads_bundle else None
        return {"tool": self.tool, "arguments": list(self.arguments), "bundle": bundle}

    def _arguments(self, folder: Path) -> list[str]:
        return [argument.format(out=folder) for argument in self.arguments]


def processor() -> str:
    """The name of the device that measurements run on."""
    return device_identity(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
