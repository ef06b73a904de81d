"""Times a command up to its first output."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter


def seconds_to_first_byte(command: Sequence[str], cache: Path) -> float:
    """Seconds from the start of a process to the first byte on its standard output, with its own cache folder.

    Raises RuntimeError with its standard error if it fails.
    """
    environment = os.environ | {"SSD_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}
    began = perf_counter()
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        seconds = perf_counter() - began
        _, error = process.communicate()
    if process.returncode:
        raise RuntimeError(error.decode())
    return seconds
