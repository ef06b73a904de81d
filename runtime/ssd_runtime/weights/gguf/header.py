"""Reads the header of one `.gguf` file: metadata, and the places of its tensors.

The `gguf` library's reader allocates whatever a header asks for and keeps every number as an array of its own. This one
takes memory in proportion to the header, checks every place against the file's size, and takes a tenth of a second.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf import GGML_QUANT_SIZES, GGUFValueType
from gguf import GGMLQuantizationType as Type

from ssd_profiles.errors import UserError

Value = int | float | bool | str | list[int] | list[float] | list[bool] | list[str]
"""A value of the metadata."""

VERSIONS = (2, 3)
MOST_HEADER_BYTES = 1 << 28
"""Bytes of metadata and names that are read at most. A vocabulary of 256,000 tokens with its merges takes 12 MB."""
MOST_ITEMS = 1 << 22
"""Most pairs of metadata, tensors, and items of arrays together, each of which takes up to a hundred bytes of memory.
A vocabulary of 256,000 tokens with types, scores and merges takes some 1.3 million."""
MOST_DIMENSIONS = 4
ADVICE = "download or convert it again"
FOLDER_INSTEAD = "give the model as a folder of safetensors"
"""Advice about a file that is whole, but holds something that is not served."""
ALIGNMENT = 32
"""Bytes to which tensors are aligned if the metadata does not say."""
FORMATS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}
"""Numbers of the metadata in the notation of `struct`."""
DTYPES = {Type.F32: "<f4", Type.F16: "<f2"}
"""Arrays of tensors that are read as numbers; all others are read as bytes."""


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor in a file: its type, its shape [out, …, in], its first byte, and the number of the file's part."""

    type: Type
    shape: tuple[int, ...]
    offset: int
    part: int = 0

    @property
    def dtype(self) -> str:
        """The dtype of its array, in numpy's notation."""
        return DTYPES.get(self.type, "|u1")

    @property
    def array_shape(self) -> tuple[int, ...]:
        """The shape of its array: `shape`, or rows of bytes for types that are not read as numbers."""
        if self.type in DTYPES:
            return self.shape
        columns, size = GGML_QUANT_SIZES[self.type]
        return (*self.shape[:-1], self.shape[-1] // columns * size)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        columns, size = GGML_QUANT_SIZES[self.type]
        return math.prod(self.shape) // columns * size


@dataclass(frozen=True, slots=True)
class Header:
    """The metadata of a file by key, and its tensors by name."""

    metadata: dict[str, Value]
    tensors: dict[str, Place]

    @classmethod
    def read(cls, path: Path) -> Header:
        """Read the header of `path`. Raises UserError if it is not one, or does not fit the file."""
        try:
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Cursor(data).header()
        except (OSError, ValueError) as error:
            raise UserError(f"{path}: not a GGUF file ({error}); {ADVICE}") from None


class _Cursor:
    """A position in a file's bytes. Its methods raise ValueError for what cannot be."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._size = len(data)
        self._end = min(self._size, MOST_HEADER_BYTES)
        self._at = 0
        self._items = 0

    def header(self) -> Header:
        if self._bytes(4) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        version = self._number("I")
        if version not in VERSIONS:
            raise ValueError(f"version {version}, expected {' or '.join(map(str, VERSIONS))}")
        tensors, pairs = self._number("Q"), self._number("Q")
        metadata = dict[str, Value]()
        for _ in range(self._counted(pairs, 13)):
            key = self._text()
            if key in metadata:
                raise ValueError(f"metadata {key} is there twice")
            metadata[key] = self._value(self._value_type(key), key)
        infos = [self._info() for _ in range(self._counted(tensors, 24))]
        return Header(metadata, self._places(infos, metadata))

    def _places(
        self, infos: list[tuple[str, Type, tuple[int, ...], int]], metadata: dict[str, Value]
    ) -> dict[str, Place]:
        alignment = metadata.get("general.alignment", ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"alignment {alignment}, expected a power of two")
        begin = -(-self._at // alignment) * alignment
        places = dict[str, Place]()
        for name, kind, shape, offset in infos:
            place = Place(kind, shape, begin + offset)
            if name in places:
                raise ValueError(f"tensor {name} is there twice")
            if offset % alignment or place.offset + place.nbytes > self._size:
                raise ValueError(f"tensor {name} lies outside the file, which may have been cut short")
            places[name] = place
        end, before = 0, ""
        for name, place in sorted(places.items(), key=lambda item: item[1].offset):
            if place.offset < end:
                raise ValueError(f"tensors {before} and {name} overlap")
            end, before = place.offset + place.nbytes, name
        return places

    def _info(self) -> tuple[str, Type, tuple[int, ...], int]:
        name = self._text()
        dimensions = self._number("I")
        if not 1 <= dimensions <= MOST_DIMENSIONS:
            raise ValueError(f"tensor {name} has {dimensions} dimensions")
        shape = tuple(self._number("Q") for _ in range(dimensions))[::-1]
        kind = self._number("I")
        if kind not in set(Type):
            raise ValueError(f"tensor {name} is of the unknown type {kind}")
        columns = GGML_QUANT_SIZES[Type(kind)][0]
        if 0 in shape or shape[-1] % columns:
            raise ValueError(f"tensor {name} of shape {shape} cannot be {Type(kind).name}")
        return name, Type(kind), shape, self._number("Q")

    def _value_type(self, key: str) -> GGUFValueType:
        kind = self._number("I")
        if kind not in set(GGUFValueType):
            raise ValueError(f"metadata {key} is of the unknown type {kind}")
        return GGUFValueType(kind)

    def _value(self, kind: GGUFValueType, key: str) -> Value:
        if kind == GGUFValueType.STRING:
            return self._text()
        if kind != GGUFValueType.ARRAY:
            return self._number(FORMATS[kind])
        of = self._value_type(key)
        count = self._number("Q")
        if of == GGUFValueType.ARRAY:
            raise ValueError(f"metadata {key} holds arrays of arrays")
        if of == GGUFValueType.STRING:
            return [self._text() for _ in range(self._counted(count, 8))]
        size = struct.calcsize(FORMATS[of])
        return list(struct.unpack(f"<{count}{FORMATS[of]}", self._bytes(self._counted(count, size) * size)))

    def _number(self, form: str) -> Any:
        return struct.unpack(f"<{form}", self._bytes(struct.calcsize(form)))[0]

    def _text(self) -> str:
        # Bytes that are not UTF-8 become surrogates, so that only a token or a template that has them is refused.
        return self._bytes(int.from_bytes(self._bytes(8), "little")).decode("utf-8", "surrogateescape")

    def _counted(self, count: int, least: int) -> int:
        """Count items of at least `least` bytes each. Raises ValueError for too many, or if the file ends before."""
        if count * least > self._end - self._at:
            raise ValueError("its header is cut short")
        self._items += count
        if self._items > MOST_ITEMS:
            raise ValueError(f"its header has more than {MOST_ITEMS} items")
        return count

    def _bytes(self, count: int) -> bytes:
        if count > self._end - self._at:
            raise ValueError("its header is cut short")
        self._at += count
        return self._data[self._at - count : self._at]
