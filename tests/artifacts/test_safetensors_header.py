"""Headers of safetensors files: those that are damaged or hostile end in one line, all others are read exactly."""

from __future__ import annotations

import json
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from ssd_artifacts.safetensors_header import read_header
from ssd_profiles.errors import UserError


def file(header: Any, data: int = 8, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + bytes(data)


def tensor(dtype: object = "F32", shape: object = (2,), begin: object = 0, end: object = 8) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "cut short"),
    "length of 2^63": (file({}, length=2**63), "cut short or too long"),
    "length beyond the file": (file({}, length=99), "cut short"),
    "no JSON": (file(b"\x80abc"), "not a safetensors file"),
    "deep": (file(b'{"a":' * 10**5), "recursion"),
    "a list": (file([1]), "no object"),
    "key twice": (file(b'{"a": 1, "a": 1}'), "a key twice"),
    "no entry": (file({"a": 1}), "not described"),
    "unknown dtype": (file({"a": tensor("F33")}), "unknown dtype"),
    "negative shape": (file({"a": tensor(shape=[-1, -2])}), "cannot be"),
    "shape that is true": (file({"a": tensor(shape=[True, 2])}), "cannot be"),
    "9 dimensions": (file({"a": tensor(shape=[1] * 8 + [2])}), "cannot be"),
    "shape of 2^60": (file({"a": tensor(shape=[2**60, 2**60])}), "cannot take 8 bytes"),
    "another dtype": (file({"a": tensor("F16")}), "cannot take 8 bytes"),
    "offsets reversed": (file({"a": tensor(begin=8, end=0)}), "cannot take -8 bytes"),
    "three offsets": (file({"a": tensor() | {"data_offsets": [0, 4, 8]}}), "cannot be"),
    "outside": (file({"a": tensor(begin=2**60, end=2**60 + 8)}), "outside the file"),
    "cut": (file({"a": tensor()}, data=7), "cut short"),
    "overlap": (file({"a": tensor(), "b": tensor(begin=4, end=12)}, data=12), "a and b overlap"),
    "gap": (file({"a": tensor(), "b": tensor(begin=16, end=24)}, data=24), "after a gap"),
    "surplus": (file({"a": tensor()}, data=9), "stands after its last tensor"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_header_is_refused_without_the_memory_that_it_asks_for(name: str, tmp_path: Path) -> None:
    data, says = HOSTILE[name]
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(UserError, match=says) as refused:
            read_header(path)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    assert str(refused.value).startswith(f"{path}: not a safetensors file (")
    assert len(str(refused.value)) < 400


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    for target in ("/dev/zero", "nowhere", str(tmp_path)):
        path = tmp_path / f"{len(target)}.safetensors"
        path.symlink_to(target)
        with pytest.raises(UserError, match="not a file, or a link to nothing"):
            read_header(path)


def test_tensors_are_those_of_the_library(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    random = np.random.default_rng(1)
    written = {
        "matrix": random.standard_normal((3, 5)).astype(np.float32),
        "half": random.standard_normal((2, 2, 2)).astype(np.float16),
        "number": np.array(7, np.int64),
        "nothing": np.zeros((0, 4), np.float32),
        "more of nothing": np.zeros((4, 0), np.uint8),
        "bytes": random.integers(0, 255, 5).astype(np.uint8),
    }
    save_file(written, path, {"format": "pt"})
    found = read_header(path)
    content = path.read_bytes()
    with safe_open(path, "numpy") as library:
        assert set(found) == set(library.keys())
        for name, tensor in found.items():
            part = library.get_slice(name)
            assert (tensor.dtype, list(tensor.shape)) == (part.get_dtype(), part.get_shape())
            assert content[tensor.offset : tensor.offset + tensor.nbytes] == written[name].tobytes()
            assert tensor.count == written[name].size
