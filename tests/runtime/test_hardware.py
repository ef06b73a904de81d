"""Processors are told apart by their names and features."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ssd_runtime.devices.device import device_identity, device_name

CPU = torch.device("cpu")
X86 = "processor\t: 0\nmodel\t\t: 1\nmodel name\t: AMD EPYC\nflags\t\t: avx2\nbogomips\t: 5000\n\nprocessor\t: 1\n"
ARM = "processor\t: 0\nFeatures\t: fp asimd\nCPU implementer\t: 0x41\nCPU part\t: 0xd0c\n"


def told(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (folder / "cpuinfo").write_text(text)
    monkeypatch.setattr("ssd_runtime.devices.device.CPU_INFO", folder / "cpuinfo")
    return device_identity(CPU)


@pytest.mark.parametrize(
    ("text", "old", "new"),
    [(X86, "model\t\t: 1", "model\t\t: 17"), (X86, "avx2", "avx2 avx512f"), (ARM, "0xd0c", "0xd40")],
)
def test_processors_of_one_name_are_told_apart(
    text: str, old: str, new: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = told(text, tmp_path, monkeypatch)
    assert one == told(text, tmp_path, monkeypatch)
    assert one != told(text.replace(old, new), tmp_path, monkeypatch)


def test_what_changes_from_start_to_start_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = told(X86, tmp_path, monkeypatch)
    assert one.startswith("AMD EPYC (")
    assert one == told(X86.replace("5000", "4999"), tmp_path, monkeypatch)


def test_a_system_without_cpuinfo_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ssd_runtime.devices.device.CPU_INFO", tmp_path / "none")
    assert device_name(CPU)
    assert device_identity(CPU).startswith(device_name(CPU))
