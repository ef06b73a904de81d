"""A folder of the cache that no other user can write to, so that code in it is what this user has compiled.

Whoever can write to the folder, or to one above it, could put a library of their own there, which would run as this
user. So owner and mode are checked, and what was checked is what is used: paths lead through an open descriptor.
"""

from __future__ import annotations

import os
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

OTHERS = stat.S_IWGRP | stat.S_IWOTH
LEFT_OVER = 3600.0
"""Seconds after which a temporary folder belongs to no compile that still runs."""


class NotPrivateError(Exception):
    """A folder belongs to another user, or is no folder."""


@contextmanager
def private_folder(path: Path) -> Iterator[Path]:
    """Make the folder `path` if it is not there; yield a path to it that holds within the block, whoever moves it.

    A folder of this user that others could write to is emptied, and closed to them; what killed processes left in it is
    removed. Raises NotPrivateError if `path` is another user's, or a link.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except (NotADirectoryError, PermissionError):  # a link is no directory
        raise NotPrivateError(str(path)) from None
    try:
        # The compiler is another process, to which /proc/self is its own.
        held = Path(f"/proc/{os.getpid()}/fd/{folder}")
        found = os.fstat(folder)
        if found.st_uid != os.geteuid():
            raise NotPrivateError(str(path))
        os.fchmod(folder, 0o700)
        for name in os.listdir(folder):
            if found.st_mode & OTHERS or _is_left_over(held / name):
                _remove(held / name)
        yield held
    finally:
        os.close(folder)


def open_own(path: Path) -> int | None:
    """Open a file to read. None unless it is a regular file of this user that nobody else may write to."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    found = os.fstat(file)
    if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & OTHERS:
        return file
    os.close(file)
    return None


def _is_left_over(path: Path) -> bool:
    """Whether a path is a temporary one of a process that was killed."""
    try:
        return path.name.startswith("tmp") and time.time() - path.lstat().st_mtime > LEFT_OVER
    except FileNotFoundError:  # another process may remove it at the same time
        return False


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
