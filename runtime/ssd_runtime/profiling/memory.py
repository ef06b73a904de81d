"""How much memory there is for a model, and how much it takes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch
from safetensors import SafetensorError, safe_open

from ssd_profiles.errors import UserError

CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
CGROUP_USED = Path("/sys/fs/cgroup/memory.current")
CGROUP_STAT = Path("/sys/fs/cgroup/memory.stat")
OUT_OF_MEMORY = re.compile("out of memory|not enough memory|can't allocate memory|ALLOC_FAILED")
"""What torch's allocators and cuBLAS say in a RuntimeError when memory runs out."""

DECODING_REMEDY = "give a shorter prompt, fewer new tokens, --weight-memory 0 or --dtype bf16"
"""What helps when memory runs out while decoding."""


def available_bytes(device: torch.device) -> int:
    """What can still be allocated on `device`: within a container, no more than its limit leaves."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = int(psutil.virtual_memory().available)
    try:
        # Pages of files count as used, but give way.
        stat = dict(line.split() for line in CGROUP_STAT.read_text().splitlines())
        used = int(CGROUP_USED.read_text()) - int(stat["inactive_file"]) - int(stat["active_file"])
        return min(free, int(CGROUP_LIMIT.read_text()) - used)
    except (OSError, ValueError, KeyError):  # no container, or one without a limit
        return free


def weight_bytes(files: Sequence[Path], dtype: torch.dtype | None) -> int:
    """Memory that a checkpoint's weights take once loaded as `dtype`, or as they are stored.

    Read from the files' headers alone. Raises UserError when a file is not safetensors.
    """
    total = 0
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a mapping
                    part = file.get_slice(name)
                    count = 1
                    for size in part.get_shape():
                        count *= size
                    total += count * (dtype.itemsize if dtype is not None else _stored_size(part.get_dtype()))
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path}: not a safetensors file ({error}); copy or convert the model again") from None
    return total


def gguf_bytes(path: Path) -> int:
    """Memory that the weights of a .gguf file take in fp32. Raises UserError when it is none."""
    from gguf import GGUFReader

    try:
        return sum(int(tensor.n_elements) * 4 for tensor in GGUFReader(path).tensors)
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise UserError(f"{path}: not a GGUF file ({error}); download or convert it again") from None


def require_room(spec: str, needed: int, device: torch.device) -> None:
    """Raise UserError, before anything is loaded, when `needed` bytes are not there."""
    free = available_bytes(device)
    if needed > free:
        raise UserError(
            f"{spec}: needs {gib(needed)} of memory for its weights, {gib(free)} are free on {device}; "
            "give a smaller model, --dtype bf16, or another --device"
        )


@contextmanager
def guard_memory(
    task: str, device: torch.device | str, remedy: str = "give --weight-memory 0, --dtype bf16 or a smaller model"
) -> Iterator[None]:
    """Raise UserError where memory runs out in the block: the message names task, device and remedy."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not OUT_OF_MEMORY.search(str(error)):
            raise
        raise UserError(f"out of memory on {device} while {task}; {remedy}") from None


def _stored_size(dtype: str) -> int:
    digits = "".join(c for c in dtype if c.isdigit())
    return max(1, int(digits[:2]) // 8) if digits and not dtype.startswith("F8") else 1


def gib(count: int) -> str:
    """A size for people."""
    return f"{count / 2**30:.1f} GiB"
