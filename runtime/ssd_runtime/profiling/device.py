"""Which card or processor this is: what latencies were measured on."""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path

import torch

CPU_INFO = Path("/proc/cpuinfo")
TELLING = (
    *("vendor_id", "cpu family", "model", "stepping", "cache size", "flags"),
    *("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "CPU revision", "Features"),
)
"""What /proc/cpuinfo says of a processor on x86 and on Arm that does not change from start to start."""


def device_name(device: torch.device) -> str:
    """The card, or the processor, as the system names it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return _cpu_name(_cpu_info())


def device_identity(device: torch.device) -> str:
    """The name, and of a processor what tells it from others of that name.

    Virtual machines go by names such as `AMD EPYC` whatever generation they run on, and Arm systems by `aarch64`.
    """
    if device.type == "cuda":
        return device_name(device)
    info = _cpu_info()
    told = "\n".join(info.get(key, "") for key in TELLING)
    digest = hashlib.sha256(f"{told}\n{os.cpu_count()}".encode()).hexdigest()[:6]
    return f"{_cpu_name(info)} ({digest})"


def _cpu_name(info: dict[str, str]) -> str:
    return info.get("model name") or platform.processor() or platform.machine()


def _cpu_info() -> dict[str, str]:
    """What the system says of its first processor; empty where it says it elsewhere."""
    try:
        first = CPU_INFO.read_text().partition("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}
