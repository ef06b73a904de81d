"""Compiles the C code into the wheel, so that its users need no compiler."""

from __future__ import annotations

import os
import platform
import re
import runpy
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = "ssd_runtime/weights/native"


class NativeBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Adds a library per set of instructions to the wheel of Linux on x86-64 or Arm, if there is a compiler.

    Editable installs get none: they compile the sources at first use, which change.
    """

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the libraries, and say what they run on in the wheel's tag."""
        here, native = platform.machine(), runpy.run_path(str(Path(self.root, "runtime", FOLDER, "forms.py")))
        forms = [name for name, form in native["FORMS"].items() if form.machine == here]
        wanted = version != "editable" and os.environ.get("SSD_BUILD_NATIVE") != "0"
        if not wanted or not forms or platform.libc_ver()[0] != "glibc":
            return
        self.work = TemporaryDirectory()
        libraries = {form: Path(self.work.name, native["form_name"](form)) for form in forms}
        with ThreadPoolExecutor() as pool:
            compiling = {form: pool.submit(native["compile_library"], form, to) for form, to in libraries.items()}
        for form, compiled in compiling.items():
            try:
                compiled.result()
            except (OSError, subprocess.SubprocessError) as error:
                self.app.display_warning(f"The wheel has no compiled code for {form}: {error}")
                del libraries[form]
        if not libraries:
            return
        # They need nothing but the C library, and of that the newest of the versions that their symbols name.
        needed = b"".join(each.read_bytes() for each in libraries.values())
        newest = max(int(minor) for minor in re.findall(rb"GLIBC_2\.(\d+)", needed))
        build_data["force_include"] |= {str(each): f"{FOLDER}/{each.name}" for each in libraries.values()}
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-manylinux_2_{newest}_{here}"
