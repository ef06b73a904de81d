"""One call of transformers' `generate`, and the reasons for which it is left to stock decoding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GENERATION_MODES_MAPPING, is_deepspeed_zero3_enabled, is_fsdp_managed_module

from ssd_profiles.errors import UserError
from ssd_runtime.sampling.processors import is_repeatable
from ssd_runtime.structure.processor import StructureProcessor

CACHE_NAMES = ("past_key_values", "cache")
"""Name of the cache's argument: transformers 5.24 has renamed it."""
SERVED_MODES = ("greedy_search", "sample")
SERVED_ARGUMENTS = frozenset(
    {
        "attention_mask",
        "position_ids",
        *CACHE_NAMES,
        "use_cache",
        "logits_to_keep",
        "cache_position",
    }
)
"""Arguments of the model that `generate` makes itself, or that have no effect on the tokens."""
EXACT_CACHES = (None, "dynamic", "dynamic_full", "static", "offloaded", "offloaded_static")
"""Cache implementations of transformers that keep keys and values as they are."""
NEVER_SERVED = {"UnbatchedClassifierFreeGuidanceLogitsProcessor": "guidance_scale runs the model by itself"}
"""Processors that no sequence can have, and the reason."""
ALONE_ONLY = {
    "PrefixConstrainedLogitsProcessor": "prefix_allowed_tokens_fn",
    "EncoderRepetitionPenaltyLogitsProcessor": "encoder_repetition_penalty",
    "EncoderNoRepeatNGramLogitsProcessor": "encoder_no_repeat_ngram_size",
    "SynthIDTextWatermarkLogitsProcessor": "SynthID's watermark",
}
"""Processors that tell the rows of a batch apart, and the setting that makes them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateCall:
    """The arguments that `generate` hands to a decoding method."""

    model: PreTrainedModel
    input_ids: Tensor
    """The prompts [rows, width], padded on the left."""
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig
    arguments: Mapping[str, Any]
    """Arguments of the model."""
    streamer: BaseStreamer | None

    @property
    def rows(self) -> int:
        """Number of sequences: prompts times `num_return_sequences`."""
        return self.input_ids.shape[0]

    @property
    def padding(self) -> list[int]:
        """Number of padding tokens on the left of each row."""
        mask = self.arguments.get("attention_mask")
        return [0] * self.rows if mask is None else [int(row.argmax()) for row in (mask != 0).int()]

    @property
    def max_new_tokens(self) -> int:
        """Most new tokens of a row. A user's own MaxLengthCriteria replaces the one of `max_new_tokens`."""
        lengths = [each.max_length for each in self.criteria if type(each) is MaxLengthCriteria]
        return max(1, min(lengths) - self.input_ids.shape[1])

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end a row."""
        ends = [each.eos_token_id for each in self.criteria if type(each) is EosTokenCriteria]
        return frozenset(int(token) for each in ends for token in torch.as_tensor(each).flatten())

    @property
    def other_criteria(self) -> list[StoppingCriteria]:
        """The criteria that must be called after every token."""
        return [each for each in self.criteria if type(each) not in (EosTokenCriteria, MaxLengthCriteria)]

    def reason_for_stock(self) -> str | None:
        """Why this engine cannot serve the call with the same result; None if it can."""
        return self._other_search() or self._other_inputs() or self._other_outputs() or self._bound_to_rows()

    def _other_search(self) -> str | None:
        mode = str(getattr(self.config.get_generation_mode(), "value", ""))
        if mode not in SERVED_MODES:
            return f"{mode.replace('_', ' ')} is another way to decode"
        if self.config.cache_implementation not in EXACT_CACHES:
            return f"a {self.config.cache_implementation} cache changes the output"
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return "the model runs in several processes"
        if torch.is_autocast_enabled(self.model.device.type):
            return "torch.autocast changes the dtype of stock decoding's products"
        names = [type(each).__name__ for each in self.processors]
        return next((NEVER_SERVED[name] for name in names if name in NEVER_SERVED), None)

    def _other_inputs(self) -> str | None:
        if self.model.config.is_encoder_decoder:
            return "it is an encoder-decoder model"
        if not self.model.prepare_inputs_for_generation.__module__.startswith("transformers."):
            return "the model prepares its inputs in its own way"  # as PEFT's learned prompts do
        given = [name for name, value in self.arguments.items() if value is not None and value is not False]
        others = [name for name in given if name not in SERVED_ARGUMENTS]
        if others:
            return f"{others[0]} is given to the model"
        for name in CACHE_NAMES:
            cache = self.arguments.get(name)
            if cache is not None and (getattr(cache, "_is_user_defined", False) or cache.get_seq_length() > 0):
                return f"a cache is given ({name})"
        if self.input_ids.shape[1] == 0:
            return "there is no prompt"
        return self._other_positions()

    def _other_positions(self) -> str | None:
        for name in ("attention_mask", "position_ids"):
            given = self.arguments.get(name)
            if given is not None and given.shape[-1] != self.input_ids.shape[1]:
                return f"{name} has another length than the prompt"
        mask = self.arguments.get("attention_mask")
        if mask is None:
            mask = torch.ones_like(self.input_ids)
        seen = mask != 0
        # Once tokens have begun, none may be hidden, the last one least of all.
        if not bool(seen[:, -1].all()) or bool((seen[:, :-1] & ~seen[:, 1:]).any()):
            return "attention_mask hides other tokens than padding on the left"
        positions = self.arguments.get("position_ids")
        if positions is not None and bool(((positions - seen.long().cumsum(-1) + 1) * seen).any()):
            return "position_ids do not count the tokens from 0"
        return None

    def _other_outputs(self) -> str | None:
        for name in ("output_attentions", "output_hidden_states"):
            if getattr(self.config, name, False):
                return f"{name} is wanted"
        return None

    def _bound_to_rows(self) -> str | None:
        """Reasons that hold for several rows only."""
        if self.rows == 1:
            return None
        if self.streamer is not None:
            return "a streamer takes a lone sequence"
        names = [type(each).__name__ for each in self.processors]
        bound = next((ALONE_ONLY[name] for name in names if name in ALONE_ONLY), None)
        if bound is not None:
            return f"{bound} tells the rows of a batch apart"
        ends = any(type(each) is not MaxLengthCriteria for each in self.criteria)
        if ends and self.config._pad_token_tensor is None:
            return "rows may end at different lengths, and there is no pad_token_id"
        if ends and not any(hasattr(each, "eos_token_id") for each in self.criteria):
            return "without an end-of-sequence token, transformers goes on with rows that have ended"
        own = next((each for each in (*self.processors, *self.other_criteria) if not _reads_rows_alike(each)), None)
        if own is not None:
            return f"{type(own).__name__} may tell the rows of a batch apart, or count its calls"
        return None


def _reads_rows_alike(part: LogitsProcessor | StoppingCriteria) -> bool:
    """Whether a processor or criterion does to each row of a batch what it does to that row alone."""
    kind = type(part)
    return kind.__module__.startswith("transformers.") or kind is StructureProcessor or is_repeatable(part)


def stock(call: GenerateCall) -> Any:
    """Decode a call as transformers does. Raises UserError for a search that has moved to a repository on the Hub."""
    mode = call.config.get_generation_mode()
    name = GENERATION_MODES_MAPPING[mode]
    if "/" in name:
        raise UserError(f"generate: this search is custom code on the Hub; give custom_generate={name!r} instead")
    arguments = dict(call.arguments)
    if call.streamer is not None:
        if name == "_beam_search":
            raise UserError("streamer: beam search has no answer to stream before its end; omit one of them")
        arguments["streamer"] = call.streamer
    if _waits_for_peers(call.model):
        arguments["synced_gpus"] = True
    if name == "_assisted_decoding":
        arguments["inputs_tensor"] = call.input_ids
    method: Callable[..., Any] = getattr(type(call.model), name)
    return method(
        call.model,
        call.input_ids,
        logits_processor=call.processors,
        stopping_criteria=call.criteria,
        generation_config=call.config,
        **arguments,
    )


def _waits_for_peers(model: PreTrainedModel) -> bool:
    """Whether every process must run as many forwards as the others; `generate` does not pass its `synced_gpus` on."""
    several = torch.distributed.is_available() and torch.distributed.is_initialized()
    return several and (is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model))
