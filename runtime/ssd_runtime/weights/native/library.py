"""Loads the C code of this folder: as it comes with a wheel, else compiled once per processor and user."""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import numpy as np
import torch  # its OpenMP library is the one that the code finds
from numpy.typing import NDArray
from torch import Tensor

from ssd_artifacts.files import cache_folder
from ssd_profiles.errors import UserError
from ssd_runtime.devices.device import processor_flags
from ssd_runtime.weights.native.forms import COMPILERS, FOLDER, FORMS, compile_library, form_name, require_compiler
from ssd_runtime.weights.native.private import NotPrivateError, open_own, private_folder

POINTER, COUNT, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


def fields(kind: type, names: str) -> list[tuple[str, type]]:
    """Fields of one kind in a structure of the C code, in order."""
    return [(name, kind) for name in names.split()]


class Library:
    """The functions of `sublayers.c`."""

    def __init__(self, file: int, note: str | None) -> None:
        """Load the open file, which stays open: the loader knows libraries by the names that they were opened by.

        `note` is a line for the user. Raises OSError, AttributeError or ValueError if the file is no such library.
        """
        functions = ctypes.CDLL(f"/proc/self/fd/{file}")
        self.note = note
        self.instructions = (ctypes.c_char * 8).in_dll(functions, "instructions").value.decode()
        sized = (POINTER, COUNT)
        rows, memory = (*sized, COUNT), (*sized, ctypes.c_int)
        self._repack = functions.repack
        self._repack.argtypes = (COUNT, *sized, COUNT, COUNT, *sized, COUNT, ctypes.c_int)
        self._round = functions.round_rows
        self._round.argtypes = (*sized, *(COUNT,) * 5, *sized, *sized, ctypes.c_int)
        self.linear = functions.linear
        self.linear.argtypes = (POINTER, POINTER, *rows, *sized, FLOAT, POINTER, *memory)
        self.mlp = functions.mlp
        self.mlp.argtypes = (POINTER, POINTER, POINTER, POINTER, *rows, POINTER, *memory)
        self.end_layer = functions.end_layer
        self.end_layer.argtypes = (POINTER, *sized, *rows, POINTER, *memory)
        self.experts = functions.experts
        self.experts.argtypes = (POINTER, POINTER, *rows, POINTER, *sized, POINTER, *memory)
        self.attention = functions.attention
        rotation = (POINTER, POINTER, COUNT, COUNT, COUNT)
        self.attention.argtypes = (POINTER, POINTER, *sized, *rotation, *rows, COUNT, POINTER, *memory)
        self.recur = functions.recur
        self.recur.argtypes = (POINTER, *sized, *sized, POINTER, POINTER, *rows, POINTER, *memory)
        self.mixer = functions.mixer
        self.mixer.argtypes = (POINTER, POINTER, *sized, *rows, *sized, POINTER, *memory)
        self.run = functions.run
        self.run.argtypes = (POINTER, COUNT, COUNT, *rows, POINTER, *memory)
        self._rule = functions.rule
        self._rule.argtypes = (ctypes.c_int,)
        self._rule.restype = ctypes.c_char_p
        self._set_torch_threads = functions.set_torch_threads
        self._set_torch_threads.argtypes = (ctypes.c_int,)
        self._set_torch_threads.restype = None

    def write(self, y: Tensor, size: int, function: Callable[..., int], *given: object) -> Tensor:
        """Call a function with what it is `given`, so that it writes `y` with `size` floats of memory; returns `y`.

        It runs on as many threads as torch uses. Raises RuntimeError with the rule of `checks.h` that the call breaks.
        """
        memory = floats(size)
        code = function(*given, y.data_ptr(), memory.data_ptr(), size, torch.get_num_threads())
        if code:
            raise self.refusal(code)
        return y

    def repack(self, number: int, blocks: NDArray[np.uint8], columns: int, tiles: Tensor, begin: int) -> None:
        """Order a file's `blocks` [out, bytes] of a format as the tiles from `begin` on of a weight of these columns.

        Raises RuntimeError with the rule of `checks.h` that the call breaks.
        """
        source, target = np.ascontiguousarray(blocks), (tiles.data_ptr(), tiles.nbytes)
        given = (number, source.ctypes.data, source.nbytes, len(blocks), columns, *target, begin)
        if code := self._repack(*given, torch.get_num_threads()):
            raise self.refusal(code)

    def round(self, weight: Tensor, bits: int, blocks: NDArray[np.uint8]) -> tuple[float, float]:
        """Round a weight [out, in] in fp32, bf16 or fp16 to `blocks` [out, bytes] of Q4_1 or Q8_0, of 4 or 8 bits.

        Returns the sum of squared errors, for 4 bits, and that of squares. Raises RuntimeError as `repack` does.
        """
        weight = weight.contiguous()
        sums = np.empty((len(weight), 2))
        given = (weight.data_ptr(), weight.nbytes, weight.itemsize, weight.dtype == torch.bfloat16, *weight.shape, bits)
        targets = (blocks.ctypes.data, blocks.nbytes, sums.ctypes.data, sums.nbytes)
        if code := self._round(*given, *targets, torch.get_num_threads()):
            raise self.refusal(code)
        error, squares = sums.sum(0)
        return float(error), float(squares)

    def refusal(self, code: int) -> RuntimeError:
        """The error for a call that returned `code` and did nothing, with the rule of `checks.h` that it breaks."""
        return RuntimeError(f"sizes of a call of our own kernels do not agree: {self._rule(code).decode()}")

    @contextmanager
    def torch_alone(self) -> Iterator[None]:
        """Let torch use one thread within, in the calling thread alone.

        Its other threads spin for some milliseconds after their work, on processors that our own want.
        """
        before = torch.get_num_threads()
        self._set_torch_threads(1)
        try:
            yield
        finally:
            self._set_torch_threads(before)


def wanted() -> bool:
    """Whether this processor has the instructions, and `SSD_NATIVE` is not 0."""
    return bool(_forms())


def missing_note() -> str | None:
    """A line for a user whose processor could run the code if it could be compiled, or kept; None for all others."""
    if not wanted():
        return None
    if (found := library()) is not None:
        return found.note
    return (
        "the C code for this processor could not be compiled, so light drafts and packed weights use slower kernels; "
        f"install {COMPILERS[0]}, or name one in $CC"
    )


@cache
def library() -> Library | None:
    """The C code in the first of `_forms` that is there or can be compiled; None if there is none.

    Compilers that are older than a processor may know the instructions of a slower form alone.
    """
    return next(filter(None, (_shipped(form) or _compiled_here(form) for form in _forms())), None)


def _forms() -> list[str]:
    """The forms that this processor can run, the faster first, or the one among them that `SSD_NATIVE` names.

    Raises UserError for another value of that.
    """
    asked = os.environ.get("SSD_NATIVE", "")
    if asked not in ("", "0", "1", *FORMS):
        raise UserError(f"SSD_NATIVE: expected 0, avx2 or avxvnni, got {asked!r}; unset it for what the processor has")
    flags = processor_flags()
    return [form for form, each in FORMS.items() if flags >= each.needed and asked in ("", "1", form)]


def _shipped(form: str) -> Library | None:
    """The library of a form that the package has; None if it has none, or none of these sources."""
    try:
        return Library(os.open(FOLDER / form_name(form), os.O_RDONLY), None)
    except OSError:
        return None


def _compiled_here(form: str) -> Library | None:
    """The library of a form from the user's cache, compiled unless it is there; None if that fails."""
    kept = cache_folder() / "native"
    try:
        try:
            with private_folder(kept) as folder:
                return _kept(folder / form_name(form)) or Library(_compiled(folder, form), None)
        except (NotPrivateError, OSError):
            note = (
                f"{kept}: is not this user's own folder to write, so C code is compiled at every start; set SSD_CACHE"
            )
            with tempfile.TemporaryDirectory() as folder:
                return Library(_compiled(Path(folder), form), note)
    except (OSError, AttributeError, ValueError, subprocess.SubprocessError):
        return None


def _kept(path: Path) -> Library | None:
    """The library that this user has compiled to `path`; None unless it is there as a whole, and loads."""
    if (file := open_own(path)) is None:
        return None
    # Where a disk was full or lost its power, a file can end early: to load it would kill the process.
    header = os.pread(file, 64, 0).ljust(64, b"\0")
    sections, size, count = *struct.unpack_from("<Q", header, 40), *struct.unpack_from("<HH", header, 58)
    if count and os.fstat(file).st_size >= sections + size * count:
        with suppress(OSError):  # that of a machine with a newer C library, which shares the folder, does not load
            return Library(file, None)
    os.close(file)
    return None


def _compiled(folder: Path, form: str) -> int:
    """Compile the library of a form into a private folder, and open it. Raises OSError or SubprocessError."""
    name = form_name(form)
    require_compiler(form)
    print(f"note: compiling C code for this processor ({form}), which takes a minute or more", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        work = Path(temporary)
        compile_library(form, work / name)
        (work / name).chmod(0o700)
        with (work / name).open("rb") as written:
            os.fsync(written.fileno())
        os.replace(work / name, folder / name)
    if (file := open_own(folder / name)) is None:
        raise FileNotFoundError(name)
    return file


def floats(*shape: int) -> Tensor:
    """Memory that the C code writes floats to, whatever torch's default dtype and device are at the moment."""
    return torch.empty(*shape, dtype=torch.float32, device="cpu")
