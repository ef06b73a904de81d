"""The tensors and the metadata of a model in one `.gguf` file, or in the parts that it was split into."""

from __future__ import annotations

import mmap
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ssd_profiles.errors import UserError
from ssd_runtime.weights.gguf.header import ADVICE, Header, Place, Value

PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
"""Names of a split model's parts."""


@dataclass(frozen=True, slots=True)
class GgufIndex:
    """The metadata of a model, and its tensors by name."""

    paths: tuple[Path, ...]
    """The file, or its parts in order."""
    metadata: dict[str, Value]
    tensors: dict[str, Place]

    @classmethod
    def read(cls, path: Path) -> GgufIndex:
        """Read the headers of a file and of all parts that belong to it, whichever part is given.

        Raises UserError if a header is damaged, or if a part is missing or does not belong to the others.
        """
        header = Header.read(path)
        count = header.metadata.get("split.count", 1)
        if count in (0, 1):
            return cls((path,), header.metadata, header.tensors)
        paths = _parts(path, count)
        headers = [Header.read(part) for part in paths]
        tensors = dict[str, Place]()
        for number, (part, found) in enumerate(zip(paths, headers, strict=True)):
            got = (found.metadata.get("split.no"), found.metadata.get("split.count"))
            if got != (number, count):
                raise UserError(f"{part}: is part {got} of another model, expected {(number, count)}; {ADVICE}")
            for name, place in found.tensors.items():
                if name in tensors:
                    raise UserError(f"{part}: tensor {name} is in another part, too; {ADVICE}")
                tensors[name] = replace(place, part=number)
        expected = headers[0].metadata.get("split.tensors.count", len(tensors))
        if len(tensors) != expected:
            raise UserError(f"{paths[0]}: its parts have {len(tensors)} tensors, expected {expected}; {ADVICE}")
        return cls(tuple(paths), headers[0].metadata, tensors)

    @property
    def path(self) -> Path:
        """The file, or its first part."""
        return self.paths[0]

    @property
    def architecture(self) -> str:
        """The architecture as llama.cpp names it, such as `qwen2`. Raises UserError if the file does not say."""
        found = self.metadata.get("general.architecture")
        if not isinstance(found, str):
            raise UserError(f"{self.path}: does not say its architecture; {ADVICE}")
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors as they are stored."""
        return sum(place.nbytes for place in self.tensors.values())

    @property
    def dense_bytes(self) -> int:
        """Bytes of all tensors in fp32."""
        return sum(4 * int(np.prod(place.shape)) for place in self.tensors.values())


def _parts(path: Path, count: Value) -> list[Path]:
    match = PART.fullmatch(path.name)
    if match is None or not isinstance(count, int) or int(match["count"]) != count:
        raise UserError(
            f"{path}: one of {count} parts, but its name does not end in -0000N-of-{count:05}.gguf; rename the parts"
        )
    parts = [path.with_name(f"{match['stem']}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise UserError(f"{path}: one of {count} parts, of which {missing[0]} is missing; put all into one folder")
    return parts


class MappedTensors:
    """The arrays of a model's tensors, mapped into memory."""

    def __init__(self, index: GgufIndex) -> None:
        self._index = index
        self._maps = list[mmap.mmap]()
        for path in index.paths:
            with path.open("rb") as file:
                self._maps.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))

    def array(self, name: str) -> np.ndarray[Any, Any]:
        """The array of a tensor: numbers, or the bytes of quantised blocks, [out, …]."""
        place = self._index.tensors[name]
        count = int(np.prod(place.array_shape))
        return np.frombuffer(self._maps[place.part], place.dtype, count, place.offset).reshape(place.array_shape)

    def forget(self) -> None:
        """Let the system drop the pages that have been read, which it would count as this process's memory."""
        if hasattr(mmap, "MADV_DONTNEED"):
            for mapped in self._maps:
                mapped.madvise(mmap.MADV_DONTNEED)
