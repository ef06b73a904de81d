"""The files of a model folder, which anybody may have written: what they are is known before they are read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ssd_artifacts.files import cache_folder
from ssd_profiles.errors import UserError, first_line

CONFIG, TOKENIZER_CONFIG, GENERATION_CONFIG = "config.json", "tokenizer_config.json", "generation_config.json"
ADAPTER = "adapter_config.json"
TEMPLATES = "additional_chat_templates"
READ = frozenset({".json", ".jinja", ".model", ".txt", ".safetensors"})
"""Endings of the files that transformers reads."""
MOST_BYTES = 64 << 20
"""Bytes of one such file at most, weights aside. Vocabularies of 256,000 tokens take 35 MB."""
MOST_CONFIG_BYTES = 8 << 20
"""Bytes of a file of settings at most. That of a tokenizer with 6,000 added tokens takes 1.2 MB."""
ADVICE = "copy or convert it again"


@contextmanager
def guarded_loading(spec: str) -> Iterator[None]:
    """Turn every error of transformers and its libraries in the block into one line about the model `spec`."""
    try:
        yield
    except UserError:
        raise
    except BaseException as error:
        # Panics of the tokenizers library derive from BaseException, and no module exports their class.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise UserError(f"{spec}: transformers cannot load it ({first_line(error)}); {ADVICE}") from None


def require_plain_files(spec: str, folder: Path) -> None:
    """Raise UserError for a file that transformers would read without end, and for an adapter, which it may load."""
    for path in [*folder.iterdir(), *(folder / TEMPLATES).glob("*.jinja")]:
        if path.suffix not in READ:
            continue
        # A link may lead to a device, and reading a device may never end.
        if not path.is_file():
            raise UserError(f"{spec}: {path.name} is not a file, or a link to nothing; {ADVICE}")
        if path.suffix != ".safetensors" and path.stat().st_size > MOST_BYTES:
            raise UserError(f"{spec}: {path.name} is larger than {MOST_BYTES >> 20} MiB; {ADVICE}")
    if (folder / ADAPTER).exists():
        raise UserError(f"{spec}: holds an adapter ({ADAPTER}); merge it into the model and save that")


def converted_models() -> Path:
    """The folder of the models whose folders were made from `.gguf` files."""
    return cache_folder() / "models"


def read_settings(spec: str, path: Path) -> dict[str, Any]:
    """The object of a JSON file; empty if there is no such file. Raises UserError if it is anything else."""
    if not path.exists():
        return {}
    if not path.is_file():  # reading a pipe may never end
        raise UserError(f"{spec}: {path.name} is not a file; {ADVICE}")
    if path.stat().st_size > MOST_CONFIG_BYTES:
        raise UserError(f"{spec}: {path.name} is larger than {MOST_CONFIG_BYTES >> 20} MiB; {ADVICE}")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{spec}: {path.name} is not JSON ({first_line(error)}); {ADVICE}") from None
    if not isinstance(found, dict):
        raise UserError(f"{spec}: {path.name}: expected a JSON object, got {type(found).__name__}; {ADVICE}")
    return found
