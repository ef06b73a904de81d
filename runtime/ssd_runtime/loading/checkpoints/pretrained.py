"""The one door to transformers' loading. A folder's own code never runs, whatever its files and standard input say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

from ssd_artifacts.fingerprint import PROBE
from ssd_profiles.errors import UserError
from ssd_runtime.loading.checkpoints.folder import (
    ADVICE,
    GENERATION_CONFIG,
    TOKENIZER_CONFIG,
    converted_models,
    guarded_loading,
    read_settings,
)

MOST_GROWTH = 64
"""Most factor by which a tokenizer may lengthen a text."""
TEXT_NAMES = {r"^(model\.language_model|language_model\.model)\.": "model.", r"^language_model\.lm_head\.": "lm_head."}
"""Regular expressions of tensor names in a vision-language model, and what stands in their place in the causal LM."""


def read_tokenizer(spec: str, folder: Path, config: PreTrainedConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder. Raises UserError if it is damaged or needs code of its own."""
    settings = read_settings(spec, folder / TOKENIZER_CONFIG)
    with guarded_loading(spec):
        if any("/" in str(name) for name in settings.get("fast_tokenizer_files", ())):
            raise UserError(f"{spec}: {TOKENIZER_CONFIG}: fast_tokenizer_files are not all in the folder; {ADVICE}")
        named = settings.get("tokenizer_class") or getattr(config, "tokenizer_class", None)
        found = tokenizer_class_from_name(named) if named is not None else None
        if found is None and "auto_map" in settings:
            raise UserError(
                f"{spec}: its tokenizer needs code of its own ({TOKENIZER_CONFIG}: auto_map), which is never run; "
                "convert it to a tokenizer.json"
            )
        # Other classes of transformers load other files, and would ask on standard input whether to run code.
        if found is not None and not (isinstance(found, type) and issubclass(found, PreTrainedTokenizerBase)):
            raise UserError(
                f"{spec}: {TOKENIZER_CONFIG}: {str(named)[:60]} is no tokenizer that is installed; {ADVICE}"
            )
        # transformers replaces the tokenizers of some model types by one of its own, whatever vocabulary a file has.
        if folder.parent == converted_models():
            tokenizer: PreTrainedTokenizerBase = PreTrainedTokenizerFast.from_pretrained(folder)
        else:
            tokenizer = AutoTokenizer.from_pretrained(folder, config=config, trust_remote_code=False)
        if _growth(tokenizer) > MOST_GROWTH:
            raise UserError(f"{spec}: tokenizer.json makes texts more than {MOST_GROWTH} times as long; {ADVICE}")
        tokenizer.encode(PROBE)  # some damage is found only when a text is encoded
        return tokenizer


def _growth(tokenizer: PreTrainedTokenizerBase) -> float:
    """Most factor by which replacements in a tokenizer make a text longer, one after the other."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    parts = [getattr(backend, name, None) for name in ("normalizer", "pre_tokenizer", "decoder")]
    waiting = [json.loads(part.__getstate__()) for part in parts if part is not None]
    factor = 1.0
    while waiting:
        part = waiting.pop()
        if isinstance(part, list):
            waiting += part
        elif isinstance(part, dict):
            waiting += part.values()
            if part.get("type") == "Replace":
                # A regular expression may match between any two characters.
                replaced = len(part["pattern"].get("String", ""))
                factor *= max(1.0, len(part["content"]) / replaced if replaced else len(part["content"]) + 1)
    return factor


def read_generation_config(spec: str, folder: Path) -> GenerationConfig:
    """The settings of a folder's `generation_config.json`, which must be there."""
    read_settings(spec, folder / GENERATION_CONFIG)
    with guarded_loading(spec):
        return GenerationConfig.from_pretrained(folder)


def read_model(folder: Path, config: PreTrainedConfig, **settings: Any) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The model of a folder's safetensors files, and transformers' report on tensors that do not fit."""
    model, report = AutoModelForCausalLM.from_pretrained(
        folder,
        config=config,
        trust_remote_code=False,
        use_safetensors=True,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
        key_mapping=TEXT_NAMES,
        **settings,
    )
    return model, report


def unfilled_model(config: PreTrainedConfig) -> PreTrainedModel:
    """The fp32 model of a config without memory for its weights, but with the buffers that follow from the config."""
    with init_empty_weights(include_buffers=False):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    return model


def empty_model(config: PreTrainedConfig) -> PreTrainedModel:
    """The model of a config without memory for its weights."""
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    model.tie_weights()  # the first 5.x versions of transformers leave weights without memory apart
    return model
