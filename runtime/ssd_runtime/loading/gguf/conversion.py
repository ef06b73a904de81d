"""Converts `.gguf` files to folders that transformers reads, once per file, in the user's cache."""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from filelock import FileLock
from safetensors import SafetensorError
from transformers import GenerationConfig
from transformers.utils import logging as transformers_logging

from ssd_artifacts.files import clear_leftovers, new_folder
from ssd_artifacts.fingerprint import file_digest
from ssd_profiles.errors import UserError, first_line
from ssd_runtime.devices.memory import require_room
from ssd_runtime.loading.checkpoints.folder import converted_models
from ssd_runtime.loading.gguf.config import gguf_config
from ssd_runtime.loading.gguf.metadata import Metadata
from ssd_runtime.loading.gguf.models import dense_model
from ssd_runtime.loading.gguf.tokenizer import PREFIX, SUPPRESSED, gguf_tokenizer, save_tokenizer
from ssd_runtime.weights.gguf.index import GgufIndex

VERSION = 8
"""Counts the changes of what a conversion writes. Folders of other versions are not used, and go when this one's is
made."""
LONGEST_NAME = 120
"""Bytes of a file's name in that of its folder: names have at most 255."""
KEPT = "model.gguf"
"""Name of the file beside its settings, where it is kept there."""


def gguf_digest(index: GgufIndex, cached: bool = True) -> str:
    """SHA-256 of a file, or of the digests of its parts; `cached` as for `file_digest`."""
    digests = [file_digest(path, cached) for path in index.paths]
    return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()


def converted(name: str, digest: str, packed: bool, read: Callable[[], GgufIndex], keep: bool = False) -> Path:
    """The folder of a file's model in fp32, or with `packed` of its settings alone.

    With `keep` the file is moved there. It has this digest. It is read and converted if the folder is not there; raises
    UserError if it cannot be. A file that another version has kept is not fetched again.
    """
    kind = "-packed" if packed else ""
    short = name.encode()[:LONGEST_NAME].decode(errors="ignore")
    before = f"{short}-{digest[:12]}-v"
    folder = converted_models() / f"{before}{VERSION}{kind}"
    if (folder / "config.json").is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.parent / f".{folder.name}.lock"):  # one process makes it while others wait
        clear_leftovers(folder)
        if not (folder / "config.json").is_file():
            others = [
                each for each in folder.parent.iterdir() if re.fullmatch(rf"{re.escape(before)}\d+{kind}", each.name)
            ]
            known = next((each / KEPT for each in others if keep and (each / KEPT).is_file()), None)
            index = read() if known is None else GgufIndex.read(known)
            with new_folder(folder) as temporary:
                _convert(index, temporary, packed)
                if keep:
                    shutil.move(index.path, temporary / KEPT)
            for each in others:
                shutil.rmtree(each, ignore_errors=True)
    return folder


def _convert(index: GgufIndex, folder: Path, packed: bool) -> None:
    """Write configuration, tokenizer, the tokens that end an answer, and dense weights, as transformers reads them."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    config = gguf_config(index)
    tokenizer, ends = gguf_tokenizer(index)
    special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config.update(special)
    if not packed:
        stay_packed = "give --weights packed on a processor, or a smaller model"
        require_room(str(index.path), index.dense_bytes, torch.device("cpu"), stay_packed)
        try:
            dense_model(index, config).save_pretrained(folder)
        except SafetensorError as error:  # safetensors reports a full disk this way
            raise UserError(f"{folder}: cannot be written ({first_line(error)}); make room or set SSD_CACHE") from None
    config.save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
    chosen = {"eos_token_id": ends or None, "suppress_tokens": Metadata(index, PREFIX).listed(SUPPRESSED) or None}
    GenerationConfig(**special | chosen).save_pretrained(folder)
