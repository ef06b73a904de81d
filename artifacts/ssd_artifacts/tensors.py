"""Reads and checks safetensors files of a bundle."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from numpy.typing import DTypeLike, NDArray
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open

from ssd_profiles.errors import UserError, first_problem

ANY = -1
"""Wildcard for a dimension in `is_tensor`."""


MAX_HEADER = 1 << 20
"""Most bytes of a file besides its tensors."""
MAX_TENSORS_BYTES = 256 << 20
"""Most bytes of a file whose size follows from no shape: vectors of 8,000 prompts of a hidden size of 8k."""


@contextmanager
def opened(path: str, what: str, most: int = MAX_TENSORS_BYTES) -> Iterator[Any]:
    """Open a safetensors file of at most `most` bytes as numpy arrays.

    Any error of the file or of the block's own look-ups becomes a UserError saying that `what` is damaged.
    """
    if os.path.getsize(path) > most:
        raise damaged(path, what, f"larger than {most >> 20} MiB")
    try:
        with safe_open(path, framework="numpy") as file:
            yield file
    except ValidationError as error:
        raise damaged(path, what, first_problem(error)) from None
    except (OSError, SafetensorError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise damaged(path, what, str(error)) from None


def is_tensor(values: NDArray[Any], dtype: DTypeLike, *shape: int) -> bool:
    """Whether `values` have this dtype and shape, where `ANY` matches every size."""
    return (
        values.dtype == dtype
        and values.ndim == len(shape)
        and all(expected in (ANY, size) for expected, size in zip(shape, values.shape, strict=True))
    )


def damaged(path: str, what: str, why: str) -> UserError:
    """The UserError for a file that is not what the compiler wrote."""
    return UserError(f"{path}: damaged {what} ({why[:300]}); compile the bundle again")
