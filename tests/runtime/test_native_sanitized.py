"""The tests of shapes on a library that ends the process at the first byte out of bounds and at undefined behaviour."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ssd_runtime.devices.device import processor_flags
from ssd_runtime.weights.native.library import wanted

FOLDER = Path(__file__).parent
PARTS = "test_parts_of_a_weight_are_ordered_as_the_whole_is"
TESTS = (str(FOLDER / "test_native_shapes.py"), f"{FOLDER / 'test_formats.py'}::{PARTS}")
COMPILER = "gcc"
SANITIZE = "-O1 -fsanitize=address,undefined -fno-sanitize-recover=all"


def sanitizer() -> str:
    """The path of libasan; skips the test if there is no compiler or no such library."""
    if shutil.which(COMPILER) is None:
        pytest.skip(f"needs {COMPILER}")
    found = subprocess.run([COMPILER, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    if not Path(found.stdout.strip()).is_absolute():
        pytest.skip("needs libasan")
    return found.stdout.strip()


def test_no_shape_reads_or_writes_out_of_bounds(tmp_path: Path) -> None:
    if not wanted():
        pytest.skip("needs AVX2")
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\nunset LD_PRELOAD\nexec {COMPILER} "$@" {SANITIZE}\n')
    compiler.chmod(0o700)
    environment = {
        **os.environ,
        "CC": str(compiler),
        "SSD_NATIVE": "1",
        "LD_PRELOAD": sanitizer(),
        "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONMALLOC": "malloc",  # Python's own allocator hides where structures end
    }
    # All instruction sets in one process: it takes longer to start than to run. Without capturing, so that what the
    # sanitizer says is not lost with the process.
    command = [sys.executable, "-m", "pytest", "-s", "-p", "no:cacheprovider", *TESTS]
    if "avx512_vnni" not in processor_flags():
        command += ["-k", f"best or {PARTS}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, "skipped" in done.stdout) == (0, False), (done.stdout + done.stderr)[-3000:]
