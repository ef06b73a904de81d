"""Loads a model with its tokenizer, and encodes conversations for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jinja2 import TemplateError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from ssd_artifacts.fingerprint import ModelFingerprint, config_sha256, tokenizer_sha256, weight_hashes
from ssd_profiles.errors import UserError
from ssd_profiles.prompts import Prompt
from ssd_runtime.loading.sources import LOAD_ERRORS, Source, find_model, first_line, source_of, weight_files
from ssd_runtime.model.families import family_of
from ssd_runtime.profiling.memory import require_room, weight_bytes

UNSUPPORTED = (
    "no_repeat_ngram_size",
    "encoder_repetition_penalty",
    "encoder_no_repeat_ngram_size",
    "bad_words_ids",
    "suppress_tokens",
    "begin_suppress_tokens",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "sequence_bias",
    "min_length",
    "min_new_tokens",
    "num_beams",
    "guidance_scale",
    "exponential_decay_length_penalty",
)
"""Settings of transformers' `generate` that affect the choice of tokens and that this engine ignores."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with its tokenizer and source."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    source: Source | None
    """None for a model that the user loaded. Its files are then looked up by its name when a bundle needs them."""

    @classmethod
    def of(cls, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> LoadedModel:
        """Wrap a model that transformers has loaded.

        A bundle identifies its weights by the files it came from. Later changes in memory go unnoticed, which can cost
        speed but never changes the output. Raises UserError for a model in training mode, or one that is a wrapper
        around a causal LM.
        """
        if hasattr(model, "get_base_model"):
            raise UserError("model: it is an adapter around one; give its get_base_model(), which has the adapter too")
        if not hasattr(model, "lm_head") or not hasattr(getattr(model, "model", None), "embed_tokens"):
            raise UserError(f"model: {type(model).__name__} is no causal LM; load it with AutoModelForCausalLM")
        if model.training:
            raise UserError("model: it is in training mode; call its eval() first")
        return cls(model, tokenizer, None)

    def fingerprint(self, full: bool = False) -> ModelFingerprint:
        """Compute the model's fingerprint; with `full`, hash all weights, once per file.

        Raises UserError when the files of a model that the user loaded cannot be found.
        """
        config = self.model.config
        source = self.source or source_of(self.model)
        hashes = weight_hashes(weight_files(source.folder), full)
        quantization = getattr(config, "quantization_config", None)
        return ModelFingerprint(
            name=source.name,
            revision=source.revision,
            architecture=type(self.model).__name__,
            num_layers=config.num_hidden_layers,
            weights_sha256=hashes.full,
            weights_sample_sha256=hashes.sample,
            config_sha256=config_sha256(config.to_dict()),
            tokenizer_sha256=tokenizer_sha256(self.tokenizer, self.tokenizer.chat_template),
            dtype=str(self.model.dtype).removeprefix("torch."),
            quantization=None if quantization is None else str(getattr(quantization, "quant_method", "unknown")),
        )

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end generation."""
        eos = self.model.generation_config.eos_token_id if self.model.generation_config else None
        eos = self.tokenizer.eos_token_id if eos is None else eos
        return frozenset() if eos is None else frozenset([eos] if isinstance(eos, int) else eos)

    @property
    def repetition_penalty(self) -> float:
        """Repetition penalty of the model's generation config; 1 for none. It applies to greedy decoding, too."""
        return float(getattr(self.model.generation_config, "repetition_penalty", None) or 1.0)

    @property
    def unsupported_settings(self) -> tuple[str, ...]:
        """Names of settings in the model's generation config that this engine ignores."""
        config = self.model.generation_config
        return tuple(name for name in UNSUPPORTED if getattr(config, name, None) not in (None, 0, 1, [], False))

    def encode(self, messages: Sequence[tuple[str, str]], raw: bool = False) -> list[int]:
        """Encode a conversation through the chat template, or with `raw` its texts separated by blank lines.

        Raises UserError when the template rejects the conversation.
        """
        if raw or not self.tokenizer.chat_template:
            return list(self.tokenizer("\n\n".join(text for _, text in messages))["input_ids"])
        turns = [{"role": role, "content": content} for role, content in messages]
        try:
            encoded = self.tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)
        except TemplateError as error:
            raise UserError(
                f"prompt: the model's chat template refuses it ({error}); change its messages, or use --raw"
            ) from None
        return list(encoded["input_ids"])

    def decode(self, ids: list[int]) -> str:
        """Decode token ids to text, without special tokens."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))


def conversation(prompt: Prompt) -> list[tuple[str, str]]:
    """The messages of a prompt's first turn, as (role, content) pairs."""
    return list(prompt.messages) or [("user", prompt.turns[0])]


def load_model(spec: str, device: str | None = None, dtype: str | None = None) -> LoadedModel:
    """Load `spec` onto `device`, by default CUDA where there is one.

    `dtype` is fp32, bf16 or fp16; the default is fp32 on a CPU and the checkpoint's own elsewhere. Raises UserError
    that says what to give instead.
    """
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    target = _device(device)
    if dtype is not None and dtype not in DTYPES:
        raise UserError(f"--dtype: {dtype!r} is unknown; give one of {', '.join(DTYPES)}")
    chosen: Any = DTYPES[dtype] if dtype else torch.float32 if target.type == "cpu" else "auto"
    source = find_model(spec)
    stored = None if chosen == "auto" else chosen
    try:
        family_of(AutoConfig.from_pretrained(source.folder))
        require_room(spec, weight_bytes(weight_files(source.folder), stored), target)
        tokenizer = AutoTokenizer.from_pretrained(source.folder)
        model, report = AutoModelForCausalLM.from_pretrained(source.folder, dtype=chosen, output_loading_info=True)
    except LOAD_ERRORS as error:
        raise UserError(f"{spec}: transformers cannot load it ({first_line(error)})") from None
    # transformers only reports missing weights and fills them with random numbers.
    lacking = [*report["missing_keys"], *(str(key) for key in report["mismatched_keys"])]
    if lacking:
        raise UserError(f"{spec}: the checkpoint lacks weights ({', '.join(sorted(lacking)[:3])}, …); copy it again")
    return LoadedModel(model.to(target).eval(), tokenizer, source)


def _device(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device: {name!r} cannot be used ({first_line(error)}); try cpu") from None
    return device
