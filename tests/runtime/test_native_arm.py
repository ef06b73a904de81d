"""The C code for Arm under an emulator, beside that for AVX2: both sum in the same order, to the same results."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from ssd_artifacts.files import cache_folder
from ssd_runtime.weights.native.forms import FOLDER, compile_library, form_flags, form_name
from ssd_runtime.weights.native.library import library

CROSS = "aarch64-linux-gnu-gcc"
EMULATOR = ("qemu-aarch64", "-L", "/usr/aarch64-linux-gnu", "-cpu", "max")
CALLS = Path(__file__).with_name("native_calls.c")
ROUNDED = ("recur", "after")
"""Results of the C library's functions of single numbers, which may differ in the last place."""


def printed(form: str, compiler: str, compiled: Path, folder: Path, *emulator: str) -> dict[str, list[str]]:
    """The results of all calls of a form's library, by their names."""
    calls, program = folder / f"{form}.o", folder / form
    subprocess.run([compiler, *form_flags(form), f"-I{FOLDER}", "-o", str(calls), str(CALLS)], check=True)
    linked = (str(calls), str(compiled), f"-Wl,-rpath,{compiled.parent}", "-fopenmp", "-lm")
    subprocess.run([compiler, "-o", str(program), *linked], check=True)
    done = subprocess.run([*emulator, str(program)], capture_output=True, text=True, check=True, timeout=300)
    return {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines()}


def test_arm_computes_what_avx2_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which(CROSS) is None or shutil.which(EMULATOR[0]) is None or shutil.which("gcc") is None:
        pytest.skip(f"needs gcc, {CROSS} and {EMULATOR[0]}")
    monkeypatch.setenv("SSD_NATIVE", "avx2")
    if library.__wrapped__() is None:
        pytest.skip("needs AVX2")
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\nexec {CROSS} "$@" -O1\n')  # as fast to compile as it goes
    compiler.chmod(0o700)
    monkeypatch.setenv("CC", str(compiler))
    compile_library("neon", tmp_path / "neon.so")
    arm = printed("neon", CROSS, tmp_path / "neon.so", tmp_path, *EMULATOR)
    x86 = printed("avx2", "gcc", cache_folder() / "native" / form_name("avx2"), tmp_path)
    assert arm.keys() == x86.keys()
    for name, expected in x86.items():
        assert "refused:" not in expected, name
        one, other = ([float.fromhex(number) for number in told] for told in (arm[name], expected))
        assert np.isfinite(other).all() != name.startswith("odd"), name
        assert np.any(other)
        tolerance = 1e-5 if name.startswith(ROUNDED) else 0.0
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance, err_msg=name)
