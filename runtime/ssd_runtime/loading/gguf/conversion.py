"""Converts `.gguf` files to folders that transformers reads, once per file, in the user's cache."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from filelock import FileLock
from safetensors import SafetensorError
from transformers import GenerationConfig
from transformers.utils import logging as transformers_logging

from ssd_artifacts.files import cache_folder, clear_leftovers, new_folder
from ssd_artifacts.fingerprint import file_digest
from ssd_profiles.errors import UserError, first_line
from ssd_runtime.loading.gguf.config import gguf_config
from ssd_runtime.loading.gguf.models import dense_model
from ssd_runtime.loading.gguf.tokenizer import gguf_tokenizer
from ssd_runtime.profiling.memory import require_room
from ssd_runtime.weights.gguf.index import GgufIndex

VERSION = 2
"""Counts the changes of what a conversion writes; folders of other versions are not used."""
KEPT = "model.gguf"
"""Name of a copy of the file beside its settings."""


def gguf_digest(index: GgufIndex) -> str:
    """SHA-256 of a file, or of the digests of its parts."""
    digests = [file_digest(path) for path in index.paths]
    return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()


def dense_folder(index: GgufIndex) -> Path:
    """The folder of a file's model in fp32. Raises UserError if the file cannot be converted."""
    folder = _folder(index.path.stem, gguf_digest(index), "")
    with _converting(folder) as needed:
        if needed:
            _convert_dense(index, folder)
    return folder


def settings_folder(index: GgufIndex) -> Path:
    """The folder of a file's configuration and tokenizer. Raises UserError if they cannot be converted."""
    folder = _folder(index.path.stem, gguf_digest(index), "-packed")
    with _converting(folder) as needed:
        if needed:
            _convert_settings(index, folder)
    return folder


def fetched_folder(name: str, digest: str, packed: bool, fetch: Callable[[], Path]) -> Path:
    """The folder of a file that `fetch` brings; packed ones keep the file as `KEPT`."""
    folder = _folder(name, digest, "-packed" if packed else "")
    with _converting(folder) as needed:
        if needed:
            index = GgufIndex.read(fetch())
            _convert_settings(index, folder, keep=True) if packed else _convert_dense(index, folder)
    return folder


def _folder(name: str, digest: str, kind: str) -> Path:
    return cache_folder() / "models" / f"{name}-{digest[:12]}-v{VERSION}{kind}"


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


def _convert_dense(index: GgufIndex, folder: Path) -> None:
    """Write a file's model in fp32, with its settings."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    require_room(str(index.path), index.dense_bytes, torch.device("cpu"))
    with new_folder(folder) as temporary:
        model = dense_model(index, gguf_config(index))
        try:
            model.save_pretrained(temporary)
        except SafetensorError as error:  # safetensors reports a full disk this way
            raise UserError(f"{folder}: cannot be written ({first_line(error)}); make room or set SSD_CACHE") from None
        _save_settings(index, temporary)


def _convert_settings(index: GgufIndex, folder: Path, keep: bool = False) -> None:
    """Write a file's settings, with a copy of the file if `keep`."""
    with new_folder(folder) as temporary:
        _save_settings(index, temporary)
        if keep:
            shutil.copy(index.path, temporary / KEPT)


def _save_settings(index: GgufIndex, folder: Path) -> None:
    """Write configuration, tokenizer and the tokens that end an answer, as transformers reads them."""
    config = gguf_config(index)
    tokenizer, ends = gguf_tokenizer(index)
    config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    config.pad_token_id = tokenizer.pad_token_id
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=ends or None, pad_token_id=tokenizer.pad_token_id
    ).save_pretrained(folder)
