"""Loads a model with its tokenizer, and encodes conversations for it."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from ssd_artifacts.bundle import Bundle
from ssd_artifacts.fingerprint import (
    ModelFingerprint,
    WeightHashes,
    config_sha256,
    tokenizer_sha256,
    weight_hashes,
)
from ssd_profiles.errors import UserError, first_line
from ssd_profiles.prompts import Prompt
from ssd_runtime.devices.memory import require_room, weight_bytes
from ssd_runtime.loading.checkpoint import load_checkpoint, read_checked_config, read_tensors
from ssd_runtime.loading.config import read_config
from ssd_runtime.loading.dtype_choice import faster_dtype
from ssd_runtime.loading.folder import ADVICE, guarded_loading
from ssd_runtime.loading.gguf.conversion import gguf_digest
from ssd_runtime.loading.gguf.models import packed_model
from ssd_runtime.loading.mtp import add_mtp
from ssd_runtime.loading.pretrained import read_generation_config, read_tokenizer
from ssd_runtime.loading.prompt_tokens import PromptTokens
from ssd_runtime.loading.sixteen_bits import dtype_to_keep, keep_numbers
from ssd_runtime.loading.sources import (
    NAMED,
    Source,
    can_be_packed,
    find_model,
    find_packed,
    source_of,
    weight_files,
)
from ssd_runtime.loading.wheels import DEMO
from ssd_runtime.model.family.families import family_of
from ssd_runtime.structure.grammars import Grammars
from ssd_runtime.templates.renderer import TemplateRefused
from ssd_runtime.weights.dtype_names import AUTO, read_dtype

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
PACKED = "gguf"
"""First word of the quantisation in fingerprints of models whose weights stay packed."""
WEIGHTS = ("dense", "packed")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class LoadedModel:
    """A model with its tokenizer and source."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    source: Source | None
    """None for a model that the user loaded. Its files are then looked up by its name when a bundle needs them."""
    types: str | None = None
    """Types of the tensors of a quantised file whose weights stay packed, such as `Q4_1+Q8_0`; None for others."""
    notes: tuple[str, ...] = ()
    """Messages for the user about how the model was loaded, one sentence each."""
    allow_special: bool = False
    """Whether control tokens that prompts spell take effect."""

    @classmethod
    def of(cls, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> LoadedModel:
        """Wrap a model that transformers has loaded.

        A bundle identifies its weights by the files it came from. Later changes in memory go unnoticed, which can cost
        speed but never changes the output. Raises UserError for a model in training mode, or one that is a wrapper
        around a causal LM.
        """
        if hasattr(model, "get_base_model"):
            raise UserError(
                "model: is an adapter around a causal LM; pass its get_base_model(), which includes the adapter"
            )
        family_of(model.config)
        if not hasattr(model, "lm_head") or not hasattr(getattr(model, "model", None), "embed_tokens"):
            raise UserError(
                f"model: {type(model).__name__} is not a causal LM of a supported family; load the model with "
                "AutoModelForCausalLM"
            )
        if model.training:
            raise UserError("model: is in training mode; call its eval() first")
        return cls(model, tokenizer, None)

    def fingerprint(self, full: bool = False) -> ModelFingerprint:
        """Compute the model's fingerprint; with `full`, hash all weights, once per file.

        Raises UserError when the files of a model that the user loaded cannot be found.
        """
        config = self.model.config
        source = self.source or source_of(self.model)
        if source.gguf is not None:
            digest = gguf_digest(source.gguf)
            hashes = WeightHashes(digest, digest)
        else:
            hashes = weight_hashes(weight_files(source.folder), full)
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
            quantization=self._quantization,
        )

    @property
    def _quantization(self) -> str | None:
        if self.types is not None:
            return f"{PACKED} {self.types}"
        quantization = getattr(self.model.config, "quantization_config", None)
        return None if quantization is None else str(getattr(quantization, "quant_method", "unknown"))

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end generation."""
        eos = self.model.generation_config.eos_token_id if self.model.generation_config else None
        eos = self.tokenizer.eos_token_id if eos is None else eos
        return frozenset() if eos is None else frozenset([eos] if isinstance(eos, int) else eos)

    def require_settings(self, spec: str) -> None:
        """Raise UserError, which calls the model `spec`, unless its generation settings have the types they need."""
        with guarded_loading(spec):
            if any(type(token) is not int for token in self.eos_ids):
                raise UserError(f"{spec}: eos_token_id is no token or list of tokens; {ADVICE}")
            if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0):
                raise UserError(f"{spec}: repetition_penalty is {self.repetition_penalty}, expected above 0; {ADVICE}")

    @property
    def repetition_penalty(self) -> float:
        """Repetition penalty of the model's generation config; 1 for none. It applies to greedy decoding, too."""
        return float(getattr(self.model.generation_config, "repetition_penalty", None) or 1.0)

    @property
    def unsupported_settings(self) -> tuple[str, ...]:
        """Names of settings in the model's generation config that this engine ignores."""
        config = self.model.generation_config
        return tuple(name for name in UNSUPPORTED if getattr(config, name, None) not in (None, 0, 1, [], False))

    @cached_property
    def prompts(self) -> PromptTokens:
        """The encoder of prompts."""
        return PromptTokens(self.tokenizer, self.eos_ids, self.allow_special)

    @cached_property
    def grammars(self) -> Grammars:
        """The compiler of structures that answers are held to."""
        return Grammars(self.tokenizer, self.model.config.vocab_size, self.eos_ids)

    def encode(self, messages: Sequence[tuple[str, str]], raw: bool = False) -> list[int]:
        """Encode a conversation through the chat template, or with `raw` its texts separated by blank lines.

        Control tokens that a text spells take effect with `raw` or `allow_special` alone. Raises UserError when the
        template rejects the conversation.
        """
        text = "\n\n".join(text for _, text in messages)
        if raw:
            return self.prompts.raw(text)
        if not self.tokenizer.chat_template:
            return self.prompts.text(text)
        try:
            return self.prompts.chat([{"role": role, "content": content} for role, content in messages])
        except TemplateRefused as error:
            raise UserError(
                f"prompt: the model's chat template refuses it ({error}); change its messages, or use --raw"
            ) from None

    def decode(self, ids: list[int]) -> str:
        """Decode token ids to text, without special tokens."""
        # Some tokenizers would remove spaces before punctuation, which the tokens have.
        return str(self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def conversation(prompt: Prompt) -> list[tuple[str, str]]:
    """The messages of a prompt's first turn, as (role, content) pairs."""
    return list(prompt.messages) or [("user", prompt.turns[0])]


def load_model(
    spec: str,
    device: str | None = None,
    dtype: str | None = None,
    weights: str | None = None,
    allow_special: bool = False,
) -> LoadedModel:
    """Load `spec` onto `device`, by default CUDA where there is one.

    `dtype` is fp32, bf16, fp16 (or transformers' names for these: float32, bfloat16, float16) or auto, which measures
    whether fp32 or bf16 decodes faster. The default is the checkpoint's own, but on a CPU rows are fp32, and so are
    weights that our own kernels cannot multiply by as they are (`dtype_to_keep`). `weights` is packed for a `.gguf`
    file whose weights stay quantised, or dense; by default `weights_of` without a bundle. With `allow_special`, control
    tokens that prompts spell take effect. Raises UserError that says what to give instead.
    """
    dtype = read_dtype(dtype)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    if weights is None:
        weights = weights_of(None, spec, device, dtype)
    if weights not in WEIGHTS:
        raise UserError(f"--weights: {weights!r} is unknown; give one of {', '.join(WEIGHTS)}")
    if weights == "packed":
        return _load_packed(spec, device, dtype, allow_special)
    target = _device(device)
    source = find_model(spec)
    config = read_checked_config(spec, source.folder)
    notes: tuple[str, ...] = ()
    kept = None
    if dtype in (None, AUTO) and target.type == "cpu":
        kept = dtype_to_keep(read_tensors(spec, source.folder), config)
    if dtype == AUTO:
        dtype, notes = _faster(spec, config, target, kept)
    kept = kept if dtype is None else None
    chosen: Any = DTYPES[dtype] if dtype else (kept or torch.float32) if target.type == "cpu" else "auto"
    stored = None if chosen == "auto" else chosen
    require_room(spec, weight_bytes(weight_files(source.folder), stored), target)
    tokenizer = read_tokenizer(spec, source.folder, config)
    with guarded_loading(spec):
        # With a map, every tensor goes to its device as it is read, so that the host never holds all of them.
        placed = {} if target.type == "cpu" else {"device_map": {"": target}}
        model = load_checkpoint(spec, source.folder, config, dtype=chosen, **placed).to(target).eval()
        model = model if kept is None else keep_numbers(model)
        notes += add_mtp(spec, source.folder, model)
    loaded = LoadedModel(model=model, tokenizer=tokenizer, source=source, notes=notes, allow_special=allow_special)
    loaded.require_settings(spec)
    return loaded


def _faster(
    spec: str, config: PreTrainedConfig, device: torch.device, kept: torch.dtype | None
) -> tuple[str | None, tuple[str, ...]]:
    """The dtype that `auto` stands for, and a note about it: measured on a CPU, the checkpoint's on other devices.

    None for the default. With `kept`, that has weights in this dtype.
    """
    if device.type != "cpu":
        return None, (f"--dtype auto: the checkpoint's own on {device}",)
    with guarded_loading(spec):
        found = faster_dtype(config, kept)
    return found.name if found.name == "bf16" else None, (str(found),)


def _load_packed(spec: str, device: str | None, dtype: str | None, allow_special: bool) -> LoadedModel:
    if device is not None and _device(device).type != "cpu":
        raise UserError(f"--weights packed: runs on a processor, not on {device}; use --device cpu or --weights dense")
    if dtype not in (None, "fp32"):
        raise UserError(f"--weights packed: rows are fp32, not {dtype}; omit --dtype, or use --weights dense")
    source = find_packed(spec)
    assert source.gguf is not None
    config = read_config(spec, source.folder, most_layers=len(source.gguf.tensors), most_size=source.gguf.dense_bytes)
    tokenizer = read_tokenizer(spec, source.folder, config)
    generation = read_generation_config(spec, source.folder)
    require_room(spec, source.gguf.nbytes, torch.device("cpu"))
    model, file = packed_model(source.gguf, config)
    model.generation_config = generation
    loaded = LoadedModel(
        model=model,
        tokenizer=tokenizer,
        source=source,
        types=file.types,
        notes=_requantised(file.requantised),
        allow_special=allow_special,
    )
    loaded.require_settings(spec)
    return loaded


def _requantised(tensors: Mapping[str, str]) -> tuple[str, ...]:
    """A sentence that names the tensors held with other levels than the file's, with numbers for layers' blocks."""
    if not tensors:
        return ()
    kinds = Counter((re.sub(r"^blk\.\d+\.", "blk.*.", name), kind) for name, kind in tensors.items())
    told = ", ".join(f"{count} {name} ({kind})" for (name, kind), count in sorted(kinds.items()))
    return (f"requantised to 8 bits: {told}",)


def weights_of(bundle: Bundle | None, spec: str, device: str | None = None, dtype: str | None = None) -> str:
    """The `weights` for a model given as `spec`, on a device and in a dtype, which are as for `load_model`.

    A bundle decides it for files. Without one, a `.gguf` file stays packed wherever packed weights can run, but for the
    demo model's, which stands for checkpoints.
    """
    if not can_be_packed(spec):
        return "dense"
    if bundle is not None:
        packed = (bundle.model.quantization or "").split(" ")[0] == PACKED
    else:
        packed = NAMED.get(spec) is not DEMO and read_dtype(dtype) in (None, "fp32") and _device(device).type == "cpu"
    return "packed" if packed else "dense"


def _device(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device: {name!r} cannot be used ({first_line(error)}); try cpu") from None
    return device
