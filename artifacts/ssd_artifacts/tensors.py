"""Reading a bundle's safetensors files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from safetensors import SafetensorError, safe_open

from ssd_profiles.errors import UserError


@contextmanager
def opened(path: str, what: str) -> Iterator[Any]:
    """The file, of numpy arrays. Raises UserError where it, or what it lacks, shows that `what` is damaged."""
    try:
        with safe_open(path, framework="numpy") as file:
            yield file
    except (OSError, SafetensorError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise damaged(path, what, str(error)) from None


def damaged(path: str, what: str, why: str) -> UserError:
    """What to say of a file that is not what the compiler wrote."""
    return UserError(f"{path}: damaged {what} ({why}); compile the bundle again")
