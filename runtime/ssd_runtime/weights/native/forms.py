"""Compiles the C code of this folder: into a wheel for many processors, or at first use for this one.

`hatch_build.py` runs this file by itself, so it imports the standard library alone.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

FOLDER = Path(__file__).parent
SOURCES = (
    "sublayers.c",
    *("attention.h", "avx2.h", "avx512.h", "checks.h", "exponential.h", "formats.h", "lanes.h", "pool.h", "products.h"),
)
"""The file that is compiled, and those that it includes."""
COMPILERS = ("gcc", "cc")
FLAGS = ("-O3", "-ffp-contract=off", "-D_GNU_SOURCE", "-fopenmp", "-pthread", "-fPIC", "-c")
"""-ffp-contract=off: sums must not depend on where a compiler finds it convenient to fuse two operations."""
LINK_FLAGS = ("-shared", "-pthread")
"""No -fopenmp: its threads are those of torch's own OpenMP library, which it makes visible to all. A second library
would have threads of its own, which wait on the same processors."""
NEEDED = frozenset({"avx2", "fma", "f16c"})
"""Instruction sets without which the code does not run, as Linux names them. It uses AVX-512 VNNI where that is."""
FORMS = {
    "vnni": NEEDED | {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"},
    "avx2": NEEDED,
}
"""Instruction sets of the libraries in a wheel, the faster first."""
TUNED = {"vnni": ("-mtune=icelake-server",)}
"""GCC's generic tuning is for older processors, and takes 5% longer per step on those with AVX-512."""
SECONDS = 120.0


def form_flags(form: str) -> tuple[str, ...]:
    """Flags of the compiler for one of `FORMS`."""
    return (*FLAGS, *(f"-m{name.replace('_', '')}" for name in sorted(FORMS[form])), *TUNED.get(form, ()))


def library_name(stem: str, flags: Sequence[str], about: Iterable[str] = ()) -> str:
    """A file name that no library of other sources, flags or `about` has."""
    texts = [(FOLDER / name).read_text(encoding="utf-8") for name in SOURCES]
    hashed = hashlib.sha256("\n".join([*texts, *flags, *LINK_FLAGS, *about]).encode())
    return f"{stem}-{hashed.hexdigest()[:16]}.so"


def form_name(form: str) -> str:
    """File name of one of `FORMS` in a wheel."""
    return library_name(f"sublayers-{form}", form_flags(form))


def compile_library(flags: Sequence[str], to: Path) -> None:
    """Compile the library `to`, with `$CC` if that is set. Writes another file beside it, too.

    Raises OSError or SubprocessError if there is no compiler or it fails.
    """
    compiler = os.environ.get("CC") or next((each for each in COMPILERS if shutil.which(each)), None)
    if compiler is None:
        raise FileNotFoundError("no C compiler")
    compiled = to.with_suffix(".o")
    for command in (
        [compiler, *flags, "-o", str(compiled), str(FOLDER / SOURCES[0])],
        [compiler, *LINK_FLAGS, "-o", str(to), str(compiled)],
    ):
        subprocess.run(command, check=True, capture_output=True, timeout=SECONDS)
