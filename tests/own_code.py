"""Model folders that bring code of their own, which leaves a file when it runs."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

MARK = "code-ran"
CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

Path({mark!r}).write_text("here")

class Config(LlamaConfig):
    model_type = "{kind}"

class Model(LlamaForCausalLM):
    config_class = Config

class Tokenizer(PreTrainedTokenizerFast):
    pass

def generate(model, *inputs, **arguments):
    pass
"""
MODEL = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model", "AutoModel": "own.Model"}
TOKENIZER = {"AutoTokenizer": [None, "own.Tokenizer"]}
PROCESSOR = {"AutoProcessor": "own.Tokenizer", "AutoImageProcessor": "own.Tokenizer"}


class _Pickled:
    """An object whose unpickling writes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


def edited(folder: Path, name: str, **changes: Any) -> None:
    """Change entries of a JSON file; the file may be new."""
    path = folder / name
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(known | changes))


def _generate(folder: Path) -> None:
    (folder / "custom_generate").mkdir()
    shutil.move(folder / "own.py", folder / "custom_generate" / "generate.py")


def _pickled(folder: Path, name: str) -> None:
    (folder / name).write_bytes(pickle.dumps(_Pickled(folder.parent / MARK)))


def _pickled_model(folder: Path) -> None:
    _pickled(folder, "pytorch_model.bin")
    shutil.move(folder / "model.safetensors", folder / "weights.safetensors")


def _pickled_shard(folder: Path) -> None:
    _pickled(folder, "model.bin")
    (folder / "model.safetensors").unlink()
    shutil.copy(folder.parent / "model" / "model.safetensors", folder / "other.safetensors")
    edited(folder, "model.safetensors.index.json", metadata={}, weight_map={"model.norm.weight": "model.bin"})


def _distributed(folder: Path) -> None:
    _pickled(folder, ".metadata")
    shutil.copy(folder / "model.safetensors", folder / "shard-00000-model-00000-of-00001.safetensors")


WAYS: Mapping[str, Callable[[Path], None]] = {
    "config": lambda folder: edited(folder, "config.json", model_type="own", auto_map=MODEL),
    "config of another repository": lambda folder: edited(
        folder, "config.json", model_type="own", auto_map={"AutoConfig": "other/repository--own.Config"}
    ),
    "model": lambda folder: edited(folder, "config.json", architectures=["Model"], auto_map=MODEL),
    "tokenizer": lambda folder: edited(
        folder, "tokenizer_config.json", tokenizer_class="Tokenizer", auto_map=TOKENIZER
    ),
    "tokenizer in the former form": lambda folder: edited(
        folder, "tokenizer_config.json", tokenizer_class="Tokenizer", auto_map=TOKENIZER["AutoTokenizer"]
    ),
    "processor": lambda folder: (
        edited(folder, "tokenizer_config.json", tokenizer_class="AutoProcessor"),  # type: ignore[func-returns-value]
        edited(folder, "processor_config.json", processor_class="Tokenizer", auto_map=PROCESSOR),  # type: ignore[func-returns-value]
    )[0],
    "image processor": lambda folder: (
        edited(folder, "tokenizer_config.json", tokenizer_class="AutoImageProcessor"),  # type: ignore[func-returns-value]
        edited(folder, "preprocessor_config.json", image_processor_type="Tokenizer", auto_map=PROCESSOR),  # type: ignore[func-returns-value]
    )[0],
    "pickled weights": _pickled_model,
    "pickled shard": _pickled_shard,
    "distributed checkpoint": _distributed,
}
"""Ways to bring code that are refused: name to what they change in a folder that holds `own.py`."""
UNUSED: Mapping[str, Callable[[Path], None]] = {
    "code beside the model": lambda folder: None,
    "generate": _generate,
    "model under the name of its class": lambda folder: edited(folder, "config.json", auto_map=MODEL),
    "tokenizer under the name of its class": lambda folder: edited(folder, "tokenizer_config.json", auto_map=TOKENIZER),
    "pickled weights beside others": lambda folder: _pickled(folder, "pytorch_model.bin"),
    "kernels": lambda folder: edited(
        folder,
        "config.json",
        attn_implementation="somebody/kernels",
        _attn_implementation="somebody/kernels",
        experts_implementation="somebody/kernels",
        use_kernels=True,
        fusion_config={"x": True},
        transformers_weights="other.safetensors",
        num_labels=10**9,
    ),
}
"""Ways to bring code, or names of code, that change nothing."""


def with_own_code(model: Path, to: Path, change: Callable[[Path], None], kind: str = "own") -> Path:
    """A copy of a folder that brings code; returns the file that the code leaves."""
    shutil.copytree(model, to)
    mark = to.parent / MARK
    (to / "own.py").write_text(CODE.format(mark=str(mark), kind=kind))
    change(to)
    return mark
