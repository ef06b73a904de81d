"""Compiles the C code of this folder: into a wheel for many processors, or at first use for the best of one.

`hatch_build.py` runs this file by itself, so it imports the standard library alone.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent
SOURCES = (
    "sublayers.c",
    *("attention.h", "avx2.h", "avx512.h", "checks.h", "ending.h", "experts.h", "exponential.h", "formats.h"),
    *("lanes.h", "mixing.h", "mlp.h", "neon.h", "pool.h", "processor.h", "products.h", "project.h", "recurrence.h"),
    *("repack.h", "round.h", "rows.h", "sixteen.h"),
)
"""The file that is compiled, and those that it includes."""
COMPILERS = ("gcc", "cc")
FLAGS = ("-O3", "-ffp-contract=off", "-D_GNU_SOURCE", "-fopenmp", "-pthread", "-fPIC", "-c")
"""-ffp-contract=off: sums must not depend on where a compiler finds it convenient to fuse two operations."""
LINK_FLAGS = ("-shared", "-pthread", "-lm")
"""No -fopenmp: its threads are those of torch's own OpenMP library, which it makes visible to all. A second library
would have threads of its own, which wait on the same processors."""


class Form(NamedTuple):
    """One library: for a machine, as Python names it, whose processor has instruction sets, as Linux names them."""

    machine: str
    needed: frozenset[str]
    flags: tuple[str, ...]
    """Compiler flags that this form alone has."""


def _x86(instructions: str, *tuning: str) -> Form:
    names = sorted(instructions.split())
    return Form("x86_64", frozenset(names), (*(f"-m{name.replace('_', '')}" for name in names), *tuning))


FORMS = {
    # GCC's generic tuning is for older processors, and takes 5% longer per step on those with AVX-512.
    "vnni": _x86("avx2 fma f16c avx512f avx512bw avx512dq avx512vl avx512_vnni", "-mtune=icelake-server"),
    "avxvnni": _x86("avx2 fma f16c avx_vnni"),
    # GCC puts sums off, or adds in another order, until products fill more than 16 registers. -O3 takes a quarter
    # longer, for nothing.
    "avx2": _x86("avx2 fma f16c", "-O2", "-fno-tree-ter", "-fno-tree-reassoc"),
    "neon": Form("aarch64", frozenset({"asimd", "asimddp"}), ("-march=armv8.2-a+dotprod",)),
}
"""The forms by name, the faster of a machine first."""
SECONDS = 600.0
"""A compilation takes about a minute, and several where the processors are busy."""


def form_flags(form: str) -> tuple[str, ...]:
    """Flags of the compiler for one of `FORMS`."""
    return (*FLAGS, *FORMS[form].flags)


def form_name(form: str) -> str:
    """File name of one of `FORMS`, which no library of other sources or flags has."""
    texts = [(FOLDER / name).read_text(encoding="utf-8") for name in SOURCES]
    hashed = hashlib.sha256("\n".join([*texts, *form_flags(form), *LINK_FLAGS]).encode())
    return f"sublayers-{form}-{hashed.hexdigest()[:16]}.so"


def require_compiler(form: str) -> None:
    """Raise OSError or SubprocessError, at once, unless there is a compiler that can compile one of `FORMS`."""
    _compile(*form_flags(form), "-E", "-o", os.devnull, str(FOLDER / SOURCES[0]))


def compile_library(form: str, to: Path) -> None:
    """Compile one of `FORMS` to the library `to`, with `$CC` if that is set. Writes another file beside it, too.

    Raises OSError or SubprocessError if there is no compiler or it fails.
    """
    compiled = to.with_suffix(".o")
    _compile(*form_flags(form), "-o", str(compiled), str(FOLDER / SOURCES[0]))
    _compile("-o", str(to), str(compiled), *LINK_FLAGS)


def _compile(*arguments: str) -> None:
    compiler = shlex.split(os.environ.get("CC", "")) or [each for each in COMPILERS if shutil.which(each)][:1]
    if not compiler:
        raise FileNotFoundError("no C compiler")
    subprocess.run([*compiler, *arguments], check=True, capture_output=True, timeout=SECONDS)
