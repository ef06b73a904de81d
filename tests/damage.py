"""Ways to alter a bundle that was saved, the manifest made to agree."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save

MANIFEST = "manifest.yaml"
# libyaml's, where PyYAML was built with it: ten times as fast.
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_DUMPER: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
Tensors = dict[str, NDArray[Any]]


def load(text: str) -> Any:
    """Parse YAML."""
    return yaml.load(text, Loader=_LOADER)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, by its path there."""
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def edit_manifest(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Alter what the manifest says."""
    data = load((folder / MANIFEST).read_text())
    change(data)
    (folder / MANIFEST).write_text(dump(data))


def swap(folder: Path, name: str, content: bytes) -> None:
    """Give a file other content."""
    (folder / name).write_bytes(content)
    entry = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
    edit_manifest(folder, lambda data: data["files"].update({name: entry}))


def rewrite(folder: Path, name: str, text: str) -> None:
    """Give a file other text."""
    swap(folder, name, text.encode())


def dump(data: Any) -> str:
    """YAML without aliases, which bundles do not have."""
    return yaml.dump(data, Dumper=_NoAliases)


class _NoAliases(_DUMPER):  # type: ignore[misc]
    def ignore_aliases(self, data: Any) -> bool:
        return True


def edit_yaml(folder: Path, name: str, change: Callable[[dict[str, Any]], object]) -> None:
    """Alter what a YAML file says."""
    data = load((folder / name).read_text())
    change(data)
    rewrite(folder, name, dump(data))


def replace_text(folder: Path, name: str, old: str, new: str) -> None:
    """Put `new` in the place of the first `old` in a text file."""
    text = (folder / name).read_text()
    assert old in text
    rewrite(folder, name, text.replace(old, new, 1))


def edit_tensors(folder: Path, name: str, **tensors: Any) -> None:
    """Replace tensors of a safetensors file; its metadata stay."""
    known, metadata = read_tensors(folder / name)
    given = {
        key: np.ascontiguousarray(value) if np.ndim(value) else np.asarray(value) for key, value in tensors.items()
    }
    swap(folder, name, save(known | given, metadata))


def edit_metadata(folder: Path, name: str, text: str) -> None:
    """Replace the one metadata entry of a safetensors file; its tensors stay."""
    known, metadata = read_tensors(folder / name)
    swap(folder, name, save(known, dict.fromkeys(metadata, text)))


def read_tensors(path: Path) -> tuple[Tensors, dict[str, str]]:
    """A safetensors file's tensors and metadata."""
    with safe_open(path, framework="numpy") as file:
        return {key: file.get_tensor(key) for key in file.keys()}, file.metadata() or {}  # noqa: SIM118
