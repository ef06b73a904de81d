"""Headers that are damaged or hostile end in one line, within bounded time and memory; all others are read exactly."""

from __future__ import annotations

import os
import random
import struct
import tracemalloc
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from hypothesis import given
from hypothesis import strategies as st

from ssd_profiles.errors import UserError
from ssd_runtime.loading.gguf.config import gguf_config
from ssd_runtime.loading.gguf.models import packed_model
from ssd_runtime.loading.gguf.tokenizer import gguf_tokenizer
from ssd_runtime.weights.gguf.header import Header
from ssd_runtime.weights.gguf.index import GgufIndex, MappedTensors
from tests.gguf_files import SIZES, add_metadata, save_gguf
from tests.models import tiny_model

MUTATIONS = int(os.environ.get("SSD_GGUF_MUTATIONS", "150"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    save_gguf(path, tiny_model("qwen2", num_hidden_layers=2, **SIZES), Type.Q4_0)
    return path


def test_metadata_and_tensors_are_those_of_the_gguf_library(whole: Path) -> None:
    reader = gguf.GGUFReader(whole)
    index = GgufIndex.read(whole)
    own = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert index.metadata == own
    tensors = MappedTensors(index)
    for tensor in reader.tensors:
        assert index.tensors[tensor.name].type == tensor.tensor_type
        assert np.array_equal(tensors.array(tensor.name), tensor.data)
    assert len(reader.tensors) == len(index.tensors)


@given(
    st.dictionaries(
        st.text("abc.", min_size=1, max_size=5),
        st.one_of(
            st.booleans(),
            st.integers(0, 2**32 - 1),
            st.floats(width=32, allow_nan=False),
            st.text(min_size=1, max_size=9),  # the library leaves empty ones out
            st.lists(st.text(max_size=5), min_size=1, max_size=4),
            st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=4),
        ),
        max_size=5,
    )
)
def test_every_value_that_is_written_is_read(values: dict[str, Any]) -> None:
    with TemporaryDirectory() as folder:
        assert written_and_read(Path(folder) / "model.gguf", values) == values


def written_and_read(path: Path, values: dict[str, Any]) -> dict[str, Any]:
    """The values as they are read from a file that the `gguf` library has written."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in values.items():
        add_metadata(writer, f"x.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    read = Header.read(path).metadata
    return {key: read[f"x.{key}"] for key in values}


def head(*parts: bytes, tensors: int = 0, pairs: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, pairs) + b"".join(parts)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def tensor(name: str = "a", shape: tuple[int, ...] = (1,), kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


HUGE = 2**60
HOSTILE = {
    "empty": (b"", "empty"),
    "another format": (b"PK\3\4" + bytes(100), "does not begin with GGUF"),
    "version 1": (head(version=1), "version 1"),
    "big-endian": (head(version=3 << 24), "version"),
    "no counts": (b"GGUF\3\0\0\0", "cut short"),
    "2^60 tensors": (head(tensors=HUGE), "cut short"),
    "2^60 pairs": (head(pairs=HUGE), "cut short"),
    "array of 2^60": (head(text("a"), struct.pack("<IIQ", 9, 4, HUGE), pairs=1), "cut short"),
    "array of 2^60 texts": (head(text("a"), struct.pack("<IIQ", 9, 8, HUGE), pairs=1), "cut short"),
    "array of 2^23": (head(text("a"), struct.pack("<IIQ", 9, 0, 1 << 23) + bytes(1 << 23), pairs=1), "4194304 items"),
    "arrays of arrays": (head(text("a"), struct.pack("<IIQ", 9, 9, 1) + bytes(16), pairs=1), "arrays of arrays"),
    "text of 2^60": (head(text("a"), struct.pack("<IQ", 8, HUGE), pairs=1), "cut short"),
    "unknown value": (head(text("a"), struct.pack("<I", 99) + bytes(16), pairs=1), "unknown type 99"),
    "key twice": (head(*2 * [text("a") + struct.pack("<IB", 0, 1)], bytes(9), pairs=2), "a is there twice"),
    "alignment 3": (head(text("general.alignment"), struct.pack("<II", 4, 3), pairs=1), "alignment 3"),
    "tensor twice": (head(tensor(), tensor(offset=32), bytes(200), tensors=2), "tensor a is there twice"),
    "overlap": (head(tensor("a", (64,)), tensor("b", (64,), offset=32), bytes(600), tensors=2), "a and b overlap"),
    "outside": (head(tensor(shape=(10**6,)), bytes(99), tensors=1), "lies outside the file"),
    "product beyond 64 bits": (head(tensor(shape=(HUGE, HUGE, HUGE)), bytes(99), tensors=1), "lies outside"),
    "offset of 2^60": (head(tensor(offset=HUGE), bytes(99), tensors=1), "lies outside"),
    "not aligned": (head(tensor(offset=4), bytes(99), tensors=1), "lies outside"),
    "no rows": (head(tensor(shape=(0, 4)), bytes(99), tensors=1), "cannot be F32"),
    "half a block": (head(tensor(shape=(40,), kind=2), bytes(99), tensors=1), "cannot be Q4_0"),
    "9 dimensions": (head(tensor(shape=(1,) * 9), bytes(99), tensors=1), "9 dimensions"),
    "unknown tensor": (head(tensor(kind=77), bytes(99), tensors=1), "unknown type 77"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_header_is_refused_without_the_memory_that_it_asks_for(name: str, tmp_path: Path) -> None:
    data, message = HOSTILE[name]
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(UserError, match=message) as caught:
            GgufIndex.read(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_mutated_file_is_refused_or_read(whole: Path, tmp_path: Path) -> None:
    """Cut, with flipped bits, with numbers replaced, or with parts exchanged: one line, or a model that runs."""
    data = whole.read_bytes()
    header = min(place.offset for place in GgufIndex.read(whole).tensors.values())
    path = tmp_path / "model.gguf"
    refusals = list[str]()
    for seed in range(MUTATIONS):
        path.write_bytes(mutated(data, header, random.Random(seed)))
        try:
            index = GgufIndex.read(path)
            config = gguf_config(index)
            gguf_tokenizer(index)
            model, _ = packed_model(index, config)
        except UserError as error:
            refusals.append(str(error))
            continue
        with torch.inference_mode():
            assert model(torch.tensor([[1, 2, 3]])).logits.shape == (1, 3, 96), seed
    assert 0.2 * MUTATIONS < len(refusals) < MUTATIONS
    assert not [line for line in refusals if "\n" in line]


def mutated(data: bytes, header: int, random: random.Random) -> bytes:
    """The file with one to four changes of its header, or cut."""
    changed = bytearray(data)
    for _ in range(random.randint(1, 4)):
        at = random.randrange(header)
        kind = random.randrange(5)
        if kind == 0:
            changed[at] ^= 1 << random.randrange(8)
        elif kind == 1:
            changed[at : at + 4] = struct.pack("<I", random.choice((0, 1, 2**31, 2**32 - 1)))
        elif kind == 2:
            changed[at : at + 8] = struct.pack("<Q", random.choice((0, 2**32, HUGE, 2**64 - 1)))
        elif kind == 3:
            other = random.randrange(header)
            changed[at : at + 16], changed[other : other + 16] = changed[other : other + 16], changed[at : at + 16]
        else:
            del changed[random.randrange(len(changed)) :]
            break
    return bytes(changed)
