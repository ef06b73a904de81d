"""Writing files whole or not at all, and hashing them."""

from __future__ import annotations

import glob
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SUFFIX = "?" * 8
"""What `tempfile` ends names with: not so long as to fit other names, of a bundle called `x.new` by `x`."""


def sha256_file(path: Path) -> str:
    """The file's SHA-256, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write `path` under a temporary name beside it, then rename: readers see the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with _named(path):
            with os.fdopen(handle, "wb") as file:
                file.write(content.encode() if isinstance(content, str) else content)
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Let an error that does not say where, as of a full disk, say that it was at `path`."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A temporary folder beside `path` that takes its place when the block ends well, and vanishes when not.

    A folder that stood at `path` before is replaced.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.new."))
    os.chmod(temporary, 0o755)
    try:
        with _named(path):
            yield temporary
        if path.exists():
            replaced = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.old."))
            os.replace(path, replaced / path.name)
            os.replace(temporary, path)
            shutil.rmtree(replaced, ignore_errors=True)
        else:
            os.replace(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def clear_leftovers(path: Path) -> None:
    """Remove what a `new_folder` that was killed left beside `path`; a folder it had just moved away comes back."""
    name = glob.escape(path.name)
    for moved in path.parent.glob(f".{name}.old.{SUFFIX}"):
        if not path.exists() and (moved / path.name).exists():
            os.replace(moved / path.name, path)
        shutil.rmtree(moved, ignore_errors=True)
    for unfinished in path.parent.glob(f".{name}.new.{SUFFIX}"):
        shutil.rmtree(unfinished, ignore_errors=True)


def remember(path: Path, content: str) -> None:
    """Write into the user's cache if it can be written: what is not kept there is only found out again."""
    with suppress(OSError):
        write_atomically(path, content)


def cache_folder() -> Path:
    """The user's cache for converted models, hashes and latency tables (`SSD_CACHE`, else XDG's)."""
    if chosen := os.environ.get("SSD_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ssd"
