"""Loads a folder's weights, and refuses tensors that the model lacks, does not know, or knows in another shape."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from ssd_artifacts.safetensors_header import StoredTensor, read_header
from ssd_profiles.errors import UserError
from ssd_runtime.loading.checkpoints.config import read_config
from ssd_runtime.loading.checkpoints.folder import ADVICE, CONFIG, guarded_loading, read_settings, require_plain_files
from ssd_runtime.loading.checkpoints.pretrained import TEXT_NAMES, empty_model, read_model
from ssd_runtime.model.family.families import family_of

SINGLE = "model.safetensors"
SHARDS = "model.safetensors.index.json"
SHARD_OF_TRAINING = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors$")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
PACKED_NUMBERS = 8
"""Most weights that one byte holds, in any quantised format."""
HARMLESS = re.compile(
    r"(^|\.)rotary_emb\.(inv_freq|cos_cached|sin_cached)$"  # follow from the config
    r"|(^|\.)v_head\."  # a value head for reinforcement learning, which has no part in the logits
    # What a model that sees or hears has beside its text model.
    r"|^(model\.)?(vision_tower|multi_modal_projector|embed_vision|audio_tower|embed_audio)\."
)
"""Names of tensors that checkpoints of supported models hold and that no logit depends on."""
NAMED = 3
"""Most tensors that an error names."""


def read_tensors(spec: str, folder: Path) -> dict[str, StoredTensor]:
    """All tensors of the files that transformers reads, by name. Raises UserError if two files hold the same."""
    headers = [read_header(file) for file in read_files(spec, folder)]
    names = Counter(name for header in headers for name in header)
    _refuse(spec, "holds the same weights in two shards:", [name for name, count in names.items() if count > 1])
    return {name: tensor for header in headers for name, tensor in header.items()}


def read_checked_config(spec: str, folder: Path) -> PreTrainedConfig:
    """The configuration of a folder whose tensors are those of its model, before memory is taken for any of them.

    Raises UserError, which calls the model `spec`, with the names of tensors that are missing or of another shape.
    """
    require_plain_files(spec, folder)
    tensors = read_tensors(spec, folder)
    numbers = sum(PACKED_NUMBERS * tensor.nbytes for tensor in tensors.values())
    config = read_config(spec, folder, most_layers=len(tensors), most_size=numbers)
    with guarded_loading(spec):
        model = empty_model(config)
        parameters = dict(model.named_parameters())
    quantised, joined = getattr(config, "quantization_config", None) is not None, family_of(config).router is not None
    wanted = sum(each.numel() for each in parameters.values())
    if (quantised or joined) and wanted > numbers:
        raise UserError(f"{spec}: {CONFIG} needs {wanted} weights, the files hold at most {numbers}; {ADVICE}")
    if quantised:
        return config
    with guarded_loading(spec):  # files have a tensor per expert, which transformers joins
        stored = revert_weight_conversion(model, parameters) if joined else parameters
        expected = {name: tuple(part.shape) for name, part in stored.items()}
    # Weights of the model below the head may be named as it calls them, or as a part of a model that sees, too. A tied
    # head may stand for the embedding.
    tensors = {_text_name(name): tensor for name, tensor in tensors.items()}
    found = {name if name.startswith(("model.", HEAD)) else f"model.{name}": tensor for name, tensor in tensors.items()}
    if getattr(config, "tie_word_embeddings", False) and EMBEDDING not in found and HEAD in found:
        found[EMBEDDING] = found[HEAD]
    _refuse(spec, "lacks weights:", expected.keys() - found.keys())
    shapes = [
        f"{name} is {list(found[name].shape)}, expected {list(shape)}"
        for name, shape in expected.items()
        if found[name].shape != shape
    ]
    _refuse(spec, "holds weights of another shape:", shapes)
    return config


def _text_name(name: str) -> str:
    """The tensor's name in the causal LM, from its name in the file of a vision-language model."""
    for pattern, to in TEXT_NAMES.items():
        name = re.sub(pattern, to, name)
    return name


def load_checkpoint(spec: str, folder: Path, config: PreTrainedConfig, **settings: Any) -> PreTrainedModel:
    """Load a folder's model of a checked config with transformers' `settings`; every tensor is used, or harmless.

    transformers only reports tensors that do not fit: it fills in random numbers for some and ignores others. Raises
    UserError, which calls the model `spec`, with the names of such tensors. A tied head may stand beside the embedding.
    """
    model, report = read_model(folder, config, **settings)
    _refuse(spec, "lacks weights:", report["missing_keys"])
    _refuse(spec, "holds weights of another shape:", [name for name, *_ in report["mismatched_keys"]])
    # Formats of quantised weights have tensors of their own, which transformers' quantisers know.
    quantised = getattr(model, "hf_quantizer", None) is not None
    extra = [
        name
        for name in report["unexpected_keys"]
        if not HARMLESS.search(name) and (name.endswith((".weight", ".bias")) or not quantised)
    ]
    files = read_files(spec, folder)
    _refuse(
        spec, "holds weights that this model does not know:", [name for name in extra if not _is_zero_bias(files, name)]
    )
    return model


def read_files(spec: str, folder: Path) -> list[Path]:
    """The safetensors files of a folder that transformers reads: the whole one, else those of the index.

    Raises UserError if there are none, and for an index that names anything but such files of the folder.
    """
    # transformers would take these for a checkpoint of torch.distributed, whatever stands beside them.
    if any(SHARD_OF_TRAINING.match(path.name) for path in folder.iterdir()):
        raise UserError(f"{spec}: holds a distributed checkpoint; save its model with save_pretrained")
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    places = read_settings(spec, folder / SHARDS).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise UserError(f"{spec}: has neither {SINGLE} nor an index of shards ({SHARDS}); {ADVICE}")
    for name in places.values():
        if not isinstance(name, str) or "/" in name or not name.endswith(".safetensors"):
            raise UserError(f"{spec}: {SHARDS} names {str(name)[:60]!r}, which is no such file of it; {ADVICE}")
    return [folder / name for name in sorted(set(places.values()))]


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
        raise UserError(f"{spec}: the checkpoint {problem} {'; '.join(found[:NAMED])}{more}; {ADVICE}")
