"""Reading the clock when the device's work is done."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import torch


def synchronize(device: torch.device) -> None:
    """Wait for work queued on `device`; returns at once for a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """How long `work` takes, device included."""
    synchronize(device)
    began = perf_counter()
    work()
    synchronize(device)
    return perf_counter() - began
