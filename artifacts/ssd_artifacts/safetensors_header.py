"""Reads the header of a safetensors file: where its tensors lie, checked against the file's size before it is used."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ssd_profiles.errors import UserError, first_line

MOST_HEADER_BYTES = 32 << 20
"""Bytes of a header that are read at most. 100,000 tensors take about 10 MB."""
MOST_DIMENSIONS = 8
BITS = {
    **dict.fromkeys(("F4", "E2M1"), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
"""Bits of a number by the format's name of its dtype."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor's dtype as the format names it, its shape, and its bytes in the file: [offset, offset + nbytes)."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def count(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file by name.

    Raises UserError unless every tensor lies inside the file, has as many bytes as its dtype and shape take, and shares
    none with another.
    """
    try:
        # A link may lead to a device, and reading a device may never end.
        if not path.is_file():
            raise ValueError("not a file, or a link to nothing")
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > min(size - 8, MOST_HEADER_BYTES):
                raise ValueError("its header is cut short or too long")
            header = json.loads(file.read(length), object_pairs_hook=_distinct)
        if not isinstance(header, dict):
            raise ValueError("its header is no object")
        tensors = {name: _tensor(name, entry, 8 + length) for name, entry in header.items() if name != "__metadata__"}
        _require_places(tensors, 8 + length, size)
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"{path}: not a safetensors file ({first_line(error)}); copy or convert the model again"
        ) from None
    return tensors


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("its header has a key twice")
    return found


def _tensor(name: str, entry: Any, begin: int) -> StoredTensor:
    """The tensor of a header's entry; offsets in the file count from `begin`."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"tensor {name} is not described by dtype, shape and data_offsets")
    bits = BITS.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if bits is None:
        raise ValueError(f"tensor {name} is of an unknown dtype")
    shape, offsets = _counts(entry["shape"]), _counts(entry["data_offsets"])
    if shape is None or len(shape) > MOST_DIMENSIONS or offsets is None or len(offsets) != 2:
        raise ValueError(f"tensor {name} has a shape or offsets that cannot be")
    first, end = offsets
    if (end - first) * 8 != math.prod(shape) * bits:
        raise ValueError(f"tensor {name} of shape {list(shape)} in {entry['dtype']} cannot take {end - first} bytes")
    return StoredTensor(entry["dtype"], shape, begin + first, end - first)


def _counts(value: Any) -> tuple[int, ...] | None:
    """The entries of a list; None unless all are whole numbers of at least 0."""
    if not isinstance(value, list) or any(type(each) is not int or each < 0 for each in value):
        return None
    return tuple(value)


def _require_places(tensors: dict[str, StoredTensor], begin: int, size: int) -> None:
    """Raise ValueError unless the tensors fill the file from `begin` to its `size`, one after the other."""
    before = ""
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if tensor.offset < begin:
            raise ValueError(f"tensors {before} and {name} overlap")
        if tensor.offset > begin or tensor.offset + tensor.nbytes > size:
            raise ValueError(f"tensor {name} lies outside the file or after a gap; it may have been cut short")
        begin, before = tensor.offset + tensor.nbytes, name
    if begin != size:
        raise ValueError("something stands after its last tensor")
