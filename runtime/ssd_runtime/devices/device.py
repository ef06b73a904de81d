"""Identifies the card or processor that latencies are measured on."""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path

import torch

from ssd_profiles.printable import printable

CPU_INFO = Path("/proc/cpuinfo")
X86_KEYS = ("vendor_id", "cpu family", "model", "stepping", "cache size", "flags")
ARM_KEYS = ("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "CPU revision", "Features")
IDENTIFYING = X86_KEYS + ARM_KEYS
"""Keys of /proc/cpuinfo that identify a processor and do not change from start to start."""


def device_name(device: torch.device) -> str:
    """The system's name of the card or processor."""
    if device.type != "cpu" and hasattr(module := torch.get_device_module(device), "get_device_name"):
        return str(module.get_device_name(device))
    return _cpu_name(_cpu_info())


def device_identity(device: torch.device) -> str:
    """The name of the device; for a processor, with a digest that tells it from others of that name.

    Virtual machines have names such as `AMD EPYC`, whatever generation they run on, and Arm systems have `aarch64`.
    """
    if device.type != "cpu":
        return device_name(device)
    info = _cpu_info()
    told = "\n".join(info.get(key, "") for key in IDENTIFYING)
    digest = hashlib.sha256(f"{told}\n{os.cpu_count()}".encode()).hexdigest()[:6]
    return f"{_cpu_name(info)} ({digest})"


def processor_flags() -> frozenset[str]:
    """Names of the processor's instruction sets, as Linux has them; empty on other systems."""
    info = _cpu_info()
    return frozenset((info.get("flags") or info.get("Features", "")).split())


def _cpu_name(info: dict[str, str]) -> str:
    return printable(info.get("model name") or platform.processor() or platform.machine())


def _cpu_info() -> dict[str, str]:
    """The entries of /proc/cpuinfo for the first processor; empty on systems without that file."""
    try:
        first = CPU_INFO.read_text().partition("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}
