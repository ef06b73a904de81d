"""Loads a folder's weights, and refuses tensors that the model lacks, does not know, or knows in another shape."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open
from transformers import AutoModelForCausalLM, PreTrainedModel

from ssd_profiles.errors import UserError

SINGLE = "model.safetensors"
SHARDS = "model.safetensors.index.json"
HARMLESS = re.compile(
    r"(^|\.)rotary_emb\.(inv_freq|cos_cached|sin_cached)$"  # follow from the config
    r"|(^|\.)v_head\."  # a value head for reinforcement learning, which has no part in the logits
)
"""Names of tensors that checkpoints of supported models hold and that no logit depends on."""
NAMED = 3
"""Most tensors that an error names."""


def load_checkpoint(spec: str, folder: Path, **settings: Any) -> PreTrainedModel:
    """Load a folder of safetensors with transformers' `settings`; every tensor is used, or known to be harmless.

    transformers only reports tensors that do not fit: it fills in random numbers for some and ignores others. Raises
    UserError, which calls the model `spec`, with the names of such tensors and of those that two shards hold. A tied
    head may stand beside the embedding.
    """
    files = read_files(folder)
    names = Counter(name for file in files for name in _names(file))
    _refuse(spec, "holds the same weights in two shards:", [name for name, count in names.items() if count > 1])
    model, report = AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, ignore_mismatched_sizes=True, **settings
    )
    _refuse(spec, "lacks weights:", report["missing_keys"])
    shapes = [
        f"{name} is {list(got)}, expected {list(expected)}" for name, got, expected in sorted(report["mismatched_keys"])
    ]
    _refuse(spec, "holds weights of another shape:", shapes)
    # Formats of quantised weights have tensors of their own, which transformers' quantisers know.
    quantised = getattr(model, "hf_quantizer", None) is not None
    extra = [
        name
        for name in report["unexpected_keys"]
        if not HARMLESS.search(name) and (name.endswith((".weight", ".bias")) or not quantised)
    ]
    _refuse(
        spec, "holds weights that this model does not know:", [name for name in extra if not _is_zero_bias(files, name)]
    )
    return model


def read_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder that transformers reads: the whole one, else those of the index."""
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    index = folder / SHARDS
    if not index.is_file():
        return []
    return [folder / name for name in sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))]


def _names(file: Path) -> list[str]:
    with safe_open(file, "pt") as opened:
        return list(opened.keys())


def _is_zero_bias(files: Sequence[Path], name: str) -> bool:
    """Whether a tensor is a bias of zeros, which converters to some quantised formats write for every projection."""
    if not name.endswith(".bias"):
        return False
    for file in files:
        with safe_open(file, "pt") as opened:
            if name in opened.keys():  # noqa: SIM118 - it is no mapping
                return not opened.get_tensor(name).any()
    return False


def _refuse(spec: str, problem: str, tensors: Iterable[str]) -> None:
    """Raise UserError if there are such tensors."""
    found = sorted(tensors)
    if found:
        more = f"; … ({len(found)} tensors)" if len(found) > NAMED else ""
        raise UserError(f"{spec}: the checkpoint {problem} {'; '.join(found[:NAMED])}{more}; copy or convert it again")
