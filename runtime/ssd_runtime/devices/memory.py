"""The memory that is free, and the memory that a model takes."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import torch

from ssd_artifacts.safetensors_header import read_header
from ssd_profiles.errors import UserError

CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
CGROUP_USED = Path("/sys/fs/cgroup/memory.current")
CGROUP_STAT = Path("/sys/fs/cgroup/memory.stat")
OUT_OF_MEMORY = re.compile("out of memory|not enough memory|can't allocate memory|ALLOC_FAILED")
"""Messages of torch's allocators and of cuBLAS in a RuntimeError when memory runs out."""

DECODING_REMEDY = "give a shorter prompt, fewer new tokens or --weight-memory 0"
"""Advice for a user whose memory runs out while decoding."""


def available_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated on `device`, within the limit of a container."""
    if device.type != "cpu" and hasattr(module := torch.get_device_module(device), "mem_get_info"):
        return int(module.mem_get_info(device)[0])
    free = int(psutil.virtual_memory().available)
    try:
        # Pages of files count as used, but the system drops them when memory is needed.
        stat = dict(line.split() for line in CGROUP_STAT.read_text().splitlines())
        used = int(CGROUP_USED.read_text()) - int(stat["inactive_file"]) - int(stat["active_file"])
        return min(free, int(CGROUP_LIMIT.read_text()) - used)
    except (OSError, ValueError, KeyError):  # there is no container, or it has no limit
        return free


def return_freed() -> None:
    """Give memory that was freed back to the system; glibc keeps hundreds of MB after large temporary tensors."""
    with suppress(OSError, AttributeError):  # another system, or another C library
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def weight_bytes(files: Sequence[Path], dtype: torch.dtype | None) -> int:
    """Bytes of a checkpoint's weights once loaded as `dtype`, or as stored if that is None.

    Only the files' headers are read. Raises UserError if a file is not safetensors.
    """
    tensors = (tensor for path in files for tensor in read_header(path).values())
    return sum(tensor.nbytes if dtype is None else tensor.count * dtype.itemsize for tensor in tensors)


def require_room(
    spec: str,
    needed: int,
    device: torch.device,
    remedy: str = "give a smaller model, --dtype bf16, or another --device",
) -> None:
    """Raise UserError with the remedy if `needed` bytes are not free on `device`."""
    free = available_bytes(device)
    if needed > free:
        raise UserError(
            f"{spec}: needs {gib(needed)} of memory for its weights, {gib(free)} are free on {device}; {remedy}"
        )


class OutOfMemoryError(UserError):
    """Memory ran out: the same may go well when less is asked for at once."""


@contextmanager
def guard_memory(
    task: str, device: torch.device | str, remedy: str = "give --weight-memory 0 or a smaller model"
) -> Iterator[None]:
    """Raise OutOfMemoryError if memory runs out in the block; the message has task, device and remedy."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not OUT_OF_MEMORY.search(str(error)):
            raise
        raise OutOfMemoryError(f"out of memory on {device} while {task}; {remedy}") from None


def gib(count: int) -> str:
    """A number of bytes as text in GiB."""
    return f"{count / 2**30:.1f} GiB"
