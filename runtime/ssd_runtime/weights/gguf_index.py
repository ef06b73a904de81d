"""Places of a `.gguf` file's tensors: read once with the `gguf` library, and kept beside the converted tokenizer.

The library parses the file's whole vocabulary at every opening, which takes seconds and a hundred MB.
"""

from __future__ import annotations

import json
import mmap
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import GGUFReader

from ssd_profiles.errors import UserError


@dataclass(frozen=True, slots=True)
class Place:
    """One tensor in the file: its type, the shape and dtype of its array, and its first byte."""

    kind: int
    shape: tuple[int, ...]
    dtype: str
    offset: int

    @property
    def type(self) -> Type:
        """The type, as the `gguf` library names it."""
        return Type(self.kind)


@dataclass(frozen=True, slots=True)
class GgufIndex:
    """The architecture of a file and the places of its tensors by name."""

    architecture: str
    tensors: dict[str, Place]

    @classmethod
    def read(cls, path: Path) -> GgufIndex:
        """Parse a file's header. Raises UserError when it is no GGUF file."""
        try:
            reader = GGUFReader(path)
            architecture = str(reader.fields["general.architecture"].contents())
        except (OSError, ValueError, KeyError, IndexError) as error:
            raise UserError(f"{path}: not a GGUF file ({error}); download or convert it again") from None
        tensors = {
            tensor.name: Place(
                kind=int(tensor.tensor_type),
                shape=tuple(int(size) for size in tensor.data.shape),
                dtype=tensor.data.dtype.str,
                offset=int(tensor.data_offset),
            )
            for tensor in reader.tensors
        }
        return cls(architecture, tensors)

    @classmethod
    def from_json(cls, text: str) -> GgufIndex:
        """The index in `to_json`'s format. Raises ValueError, KeyError or TypeError for another format."""
        known = json.loads(text)
        tensors = {name: Place(**{**place, "shape": tuple(place["shape"])}) for name, place in known["tensors"].items()}
        return cls(known["architecture"], tensors)

    def to_json(self) -> str:
        """The index as JSON."""
        return json.dumps(asdict(self))


class MappedTensors:
    """The arrays of a file's tensors, mapped into memory. Raises UserError when the file is shorter than its index."""

    def __init__(self, path: Path, index: GgufIndex) -> None:
        self.index = index
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        ends = (place.offset + self._bytes(place) for place in index.tensors.values())
        if max(ends, default=0) > len(self._map):
            raise UserError(f"{path}: shorter than its header says; download it again")

    def array(self, name: str) -> np.ndarray[Any, Any]:
        """The array of a tensor: numbers, or the bytes of quantised blocks, [out, …]."""
        place = self.index.tensors[name]
        count = int(np.prod(place.shape))
        return np.frombuffer(self._map, place.dtype, count, place.offset).reshape(place.shape)

    def forget(self) -> None:
        """Let the system drop the pages that have been read, which it would count as this process's memory."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)

    @staticmethod
    def _bytes(place: Place) -> int:
        return int(np.prod(place.shape)) * np.dtype(place.dtype).itemsize
