"""A measurement for the page of `bench.papers`: another tool of this folder, with its output as the section."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.fixtures.bundles import MadeBundle
from bench.harness.picture import Picture
from bench.harness.provenance import commit
from ssd_artifacts.files import write_atomically
from ssd_runtime.profiling.device import device_name


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
    pictures: Sequence[Picture] = ()

    def command(self, folder: Path) -> str:
        """The command as a user would type it."""
        return " ".join(("python -m", self.tool, *self._arguments(folder)))

    def run(self, folder: Path, full: bool) -> None:
        """Run the tool and keep its output in `folder`/NAME.txt, unless that exists for this bundle."""
        section = self.section(folder)
        origin = self._origin()
        if section is not None and origin in section and not self.derived:
            return
        command = [sys.executable, "-m", self.tool, *self._arguments(folder)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            print(done.stdout, end="")
            sys.exit(done.returncode)
        device = device_name(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        machine = f"{device}, {torch.get_num_threads()} threads, torch {torch.__version__}"
        measured = "" if self.derived else f"{machine}; commit {commit()}. "
        head = f"{measured}{origin}Command: `{self.command(folder)}`."
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self._path(folder), f"{head}\n{done.stdout}")

    def section(self, folder: Path) -> str | None:
        """Its section of the page; None if it has not been run with these arguments."""
        if not self._path(folder).is_file():
            return None
        head, _, printed = self._path(folder).read_text(encoding="utf-8").partition("\n")
        if not head.endswith(f"`{self.command(folder)}`."):
            return None
        said = f"\n```text\n{printed.rstrip()}\n```\n" if printed.strip() else ""
        return f"## {self.title}\n\n{head}\n{said}"

    def _origin(self) -> str:
        """A sentence that identifies the bundle, if the tool reads one."""
        return f"Bundle {self.bundle.digest()[:8]}. " if self.bundle.path in self.arguments else ""

    def _arguments(self, folder: Path) -> list[str]:
        return [argument.format(out=folder) for argument in self.arguments]

    def _path(self, folder: Path) -> Path:
        return folder / f"{self.name}.txt"
