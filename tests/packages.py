"""Builds the project and installs it as users do, without fetching anything."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from importlib.metadata import Distribution, PathDistribution, distribution
from pathlib import Path
from sysconfig import get_path

from packaging.requirements import Requirement

from ssd_artifacts.files import cache_folder
from ssd_runtime.weights.native.forms import COMPILERS

ROOT = Path(__file__).parents[1]
COMPILER = """#!/bin/sh
compiled=$(printf '%s\\n' "$@" | sed -n '/^-o$/{{n;p;}}')
known="{kept}/$(basename "${{compiled%.*}}").so"
[ -f "$known" ] || exec {compiler} "$@" -O0
cp "$known" "$compiled"
"""
"""Takes the libraries that tests have compiled already, which takes a minute each, and compiles the others unoptimised,
which takes a quarter of that and changes no result."""
SHARED = ("..", "__pycache__")
"""First parts of installed paths that belong to no distribution alone."""


def build(folder: Path) -> tuple[Path, Path]:
    """Build an sdist from the working tree, then a wheel from the unpacked sdist. Returns both files."""
    _run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(folder), at=ROOT)
    [sdist] = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    [source] = (folder / "unpacked").iterdir()
    (folder / "compiler").write_text(COMPILER.format(kept=cache_folder() / "native", compiler=COMPILERS[0]))
    (folder / "compiler").chmod(0o700)
    return sdist, build_wheel(source, folder, CC=str(folder / "compiler"))


def build_wheel(source: Path, folder: Path, **environment: str) -> Path:
    """Build the wheel of a source tree into a folder that has none."""
    _run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder), at=source, **environment)
    [wheel] = folder.glob("*.whl")
    return wheel


class CleanEnvironment:
    """A virtual environment that has what a wheel asks for and nothing else. Commands find no compiler.

    The requirements are linked from the environment of the tests, so that torch is not installed a second time.
    """

    def __init__(self, folder: Path, wheel: Path, extras: frozenset[str] = frozenset()) -> None:
        """Make the environment in `folder` and install the wheel into it with its `extras`."""
        venv.create(folder, symlinks=True)
        self.folder = folder
        self.packages = folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
        self.distributions = required(wheel, extras)
        """Names of what the wheel asks for, directly or not."""
        for name in self.distributions:
            self._link(distribution(name))
        python = str(folder / "bin" / "python")
        _run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", str(wheel), at=folder)

    def run(self, *command: str, cache: Path) -> subprocess.CompletedProcess[str]:
        """Run a command of the environment, outside the working tree and without its paths."""
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV", "CC")}
        programs = self.folder / "bin"
        environment = kept | {"SSD_CACHE": str(cache), "HF_HUB_OFFLINE": "1", "PATH": str(programs)}
        program = [str(programs / command[0]), *command[1:]]
        return subprocess.run(
            program,
            cwd=self.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )

    def _link(self, installed: Distribution) -> None:
        """Link a distribution's modules, data and metadata."""
        for part in {Path(str(file)).parts[0] for file in installed.files or ()}.difference(SHARED):
            link = self.packages / part
            if not link.exists():
                link.symlink_to(Path(get_path("purelib")) / part)


def required(wheel: Path, extras: frozenset[str]) -> set[str]:
    """Names of all distributions that a wheel needs with `extras`, directly or not."""
    [metadata] = (each for each in zipfile.Path(wheel).iterdir() if each.name.endswith(".dist-info"))
    found: dict[str, frozenset[str]] = {}
    waiting = _asked(PathDistribution(metadata), extras)
    while waiting:
        name, wanted = waiting.pop()
        if name not in found or not wanted <= found[name]:
            found[name] = found.get(name, frozenset()) | wanted
            waiting += _asked(distribution(name), found[name])
    return set(found)


def _asked(one: Distribution, extras: frozenset[str]) -> list[tuple[str, frozenset[str]]]:
    """The requirements of a distribution on this machine with `extras`: names, each with its own extras."""
    requirements = [Requirement(text) for text in one.requires or ()]
    return [
        (_normalised(each.name), frozenset(each.extras))
        for each in requirements
        if each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in ("", *extras))
    ]


def _normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _run(*command: str, at: Path, **environment: str) -> None:
    settings = {**os.environ, **environment}
    done = subprocess.run(command, cwd=at, env=settings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
