"""Atomic writes, hashes and the user's cache folder."""

from __future__ import annotations

import glob
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock

SUFFIX = "?" * 8
"""Pattern of the random ending that `tempfile` gives. A fixed length keeps `x` from matching leftovers of `x.new`."""


def sha256_file(path: Path) -> str:
    """SHA-256 of the file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file so that readers see the old content or the new one."""
    with new_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """Yield a temporary file beside `path` that replaces it when the block succeeds, and is removed when it raises."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _named(path):
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with _named(path):
            with os.fdopen(handle, "wb") as file:
                yield file
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Add `path` to an OSError that names no file, as of a full disk, or a temporary one beside it."""
    try:
        yield
    except OSError as error:
        named = None if error.filename is None else Path(os.fsdecode(error.filename))
        if error.errno is not None and (named is None or named.name.startswith(f".{path.name}.")):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder that replaces `path` when the block succeeds, and is removed when it raises.

    A folder that stood at `path` is deleted.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.new."))
    os.chmod(temporary, 0o755)
    moved: Path | None = None
    try:
        with _named(path):
            yield temporary
        if path.exists():
            moved = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.old.")) / path.name
            os.replace(path, moved)
        os.replace(temporary, path)
        if moved is not None:
            shutil.rmtree(moved.parent, ignore_errors=True)
    except BaseException:
        if moved is not None and not path.exists():
            with suppress(OSError):  # `clear_leftovers` tries again
                os.replace(moved, path)
                moved.parent.rmdir()
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def clear_leftovers(path: Path) -> None:
    """Remove what a killed `new_folder` left beside `path`; a folder that it had just moved away is moved back."""
    name = glob.escape(path.name)
    for moved in path.parent.glob(f".{name}.old.{SUFFIX}"):
        if not set(moved.glob("*")) <= {moved / path.name}:
            continue  # somebody's own
        if not path.exists() and (moved / path.name).exists():
            os.replace(moved / path.name, path)
        shutil.rmtree(moved, ignore_errors=True)
    for unfinished in path.parent.glob(f".{name}.new.{SUFFIX}"):
        shutil.rmtree(unfinished, ignore_errors=True)


@contextmanager
def write_lock(folder: Path) -> Iterator[None]:
    """Wait until no other process writes `folder`, which `new_folder` and `clear_leftovers` rely on.

    The lock file lies in the cache, so that nothing is left beside the folder. It is not re-entrant.
    """
    name = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:24]
    locks = cache_folder() / "locks"
    locks.mkdir(parents=True, exist_ok=True)
    with FileLock(locks / f"{name}.lock"):
        yield


def remember(path: Path, content: str) -> bool:
    """Write a cache file. Returns False where that fails: whatever is not cached is computed again."""
    try:
        write_atomically(path, content)
    except OSError:
        return False
    return True


def cache_folder() -> Path:
    """The user's cache for converted models, hashes and latency tables: `SSD_CACHE`, else XDG's cache folder."""
    if chosen := os.environ.get("SSD_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ssd"
