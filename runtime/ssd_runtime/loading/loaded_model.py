"""A loaded model with its tokenizer and source, and how prompts are encoded for it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ssd_artifacts.fingerprint import ModelFingerprint, WeightHashes, config_sha256, tokenizer_sha256, weight_hashes
from ssd_profiles.errors import UserError
from ssd_profiles.printable import CHARACTER, UNFINISHED, printable
from ssd_profiles.prompts import Prompt
from ssd_runtime.loading.checkpoints.folder import ADVICE, guarded_loading
from ssd_runtime.loading.gguf.conversion import gguf_digest
from ssd_runtime.loading.prompt_tokens import PromptTokens
from ssd_runtime.loading.sources import Source, source_of, weight_files
from ssd_runtime.model.family.families import family_of
from ssd_runtime.sampling.params import SamplingParams
from ssd_runtime.structure.grammars import Grammars
from ssd_runtime.templates.renderer import TemplateRefused

UNSUPPORTED = (
    *("no_repeat_ngram_size", "encoder_repetition_penalty", "encoder_no_repeat_ngram_size", "bad_words_ids"),
    *("begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id", "sequence_bias"),
    *("min_length", "min_new_tokens", "num_beams", "guidance_scale", "exponential_decay_length_penalty"),
)
"""Settings of transformers' `generate` that affect the choice of tokens and that this engine ignores."""
START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
OF_CHANNELS = (START, CHANNEL, MESSAGE, END, "<|constrain|>")
"""Control tokens that part the channels of GPT-OSS, which nothing else in its answers does."""
OF_CALLS = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|tool_call|>", "<|/tool_call|>", "<|python_tag|>")
"""Control tokens that part calls of tools from text, in vocabularies in which they are such tokens."""
PACKED = "gguf"
"""First word of the quantisation in fingerprints of models whose weights stay packed."""


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
        found, told = len(model.model.layers), model.config.num_hidden_layers
        if found != told:
            raise UserError(f"model: has {found} layers, its config {told}; set config.num_hidden_layers too")
        if model.training:
            raise UserError("model: is in training mode; call its eval() first")
        return cls(model, tokenizer, None)

    def fingerprint(self, full: bool = False, cached: bool = True) -> ModelFingerprint:
        """Compute the model's fingerprint; with `full`, hash all weights, once per file, or again without `cached`.

        Raises UserError when the files of a model that the user loaded cannot be found.
        """
        config = self.model.config
        source = self.source or source_of(self.model)
        if not source.name.isprintable():
            raise UserError(f"{printable(source.name)}: no bundle can name such a place; rename it, without odd spaces")
        if source.gguf is not None:
            digest = gguf_digest(source.gguf, cached)
            hashes = WeightHashes(digest, digest)
        else:
            hashes = weight_hashes(weight_files(source.folder), full, cached)
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
        """Tokens that end generation: those of the generation config, and the tokenizer's, which ends a chat's turn."""
        config = self.model.generation_config
        named = [None if config is None else config.eos_token_id, self.tokenizer.eos_token_id]
        return frozenset(
            token for eos in named if eos is not None for token in ([eos] if isinstance(eos, int) else eos)
        )

    def require_settings(self, spec: str) -> None:
        """Raise UserError, which calls the model `spec`, unless its generation settings have the types they need."""
        with guarded_loading(spec):
            if any(type(token) is not int for token in self.eos_ids):
                raise UserError(f"{spec}: eos_token_id is no token or list of tokens; {ADVICE}")
            if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0):
                raise UserError(f"{spec}: repetition_penalty is {self.repetition_penalty}, expected above 0; {ADVICE}")
            if any(type(token) is not int for token in self._suppressed):
                raise UserError(f"{spec}: suppress_tokens is no list of tokens; {ADVICE}")
            if len(self.greedy.suppress_tokens) == self.model.config.vocab_size:
                raise UserError(f"{spec}: suppress_tokens leaves no token; {ADVICE}")

    @property
    def greedy(self) -> SamplingParams:
        """Greedy decoding by the model's generation config: its repetition penalty, and tokens it never chooses."""
        return SamplingParams(
            repetition_penalty=self.repetition_penalty, suppress_tokens=self.in_vocabulary(self._suppressed)
        )

    def in_vocabulary(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Those of some ids that are tokens of the model, each once."""
        return tuple(sorted({token for token in tokens if 0 <= token < self.model.config.vocab_size}))

    @property
    def _suppressed(self) -> Sequence[int]:
        return getattr(self.model.generation_config, "suppress_tokens", None) or ()

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
            turns = [{"role": role, "content": content} for role, content in messages]
            return self.prompts.encode(self.prompts.render(turns))
        except TemplateRefused as error:
            raise UserError(
                f"prompt: the model's chat template refuses it ({error}); change its messages, or use --raw"
            ) from None

    @cached_property
    def has_channels(self) -> bool:
        """Whether the model writes its thoughts, calls and answer in channels (`ChannelReader`)."""
        return {CHANNEL, MESSAGE, START} <= self.prompts.control.keys()

    @cached_property
    def hidden(self) -> Mapping[str, int]:
        """Control tokens that texts do not show, by their texts: all but those that part channels and calls."""
        shown = OF_CALLS + (OF_CHANNELS if self.has_channels else ())
        return {
            text: token for text, token in self.prompts.control.items() if text not in shown or token in self.eos_ids
        }

    def decode(self, ids: list[int]) -> str:
        """Decode token ids to text, without the control tokens that are `hidden`.

        Bytes at the end that are no whole character yet leave the characters before them whole, which some tokenizers'
        decoders would lose too.
        """
        shown = [token for token in ids if token not in self._hidden_ids]
        text = self._decoded(shown)
        if text.endswith(UNFINISHED):
            for count in range(1, min(CHARACTER, len(shown))):
                whole = self._decoded(shown[:-count])
                if not whole.endswith(UNFINISHED):
                    return text if text.startswith(whole) else whole + count * UNFINISHED
        return text

    def _decoded(self, ids: list[int]) -> str:
        # Some tokenizers would remove spaces before punctuation, which the tokens have.
        return str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    @cached_property
    def _hidden_ids(self) -> frozenset[int]:
        return frozenset(self.hidden.values())


def conversation(prompt: Prompt) -> list[tuple[str, str]]:
    """The messages of a prompt's first turn, as (role, content) pairs."""
    return list(prompt.messages) or [("user", prompt.turns[0])]
