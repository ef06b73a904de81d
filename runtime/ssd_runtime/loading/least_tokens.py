"""A lower bound of a text's tokens, which takes less work than encoding it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

KEEPING = frozenset({"ByteLevel", "Digits", "Metaspace", "Split"})
"""Steps of pre-tokenizers that keep every character."""


class LeastTokens:
    """Lower bounds by the longest token, for tokenizers that lose no byte of a text after normalisation."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)

    def of(self, text: str) -> int:
        """The least number of tokens of a text; 0 where nothing is known."""
        if self._longest is None:
            return 0
        normalizer = self._backend.normalizer
        normal = normalizer.normalize_str(text) if normalizer is not None else text
        return -(-len(normal.encode(errors="replace")) // self._longest)

    @cached_property
    def _longest(self) -> int | None:
        """Most bytes of normalised text that a token stands for; None where there is no such bound."""
        if self._backend is None:
            return None
        parts = json.loads(self._backend.to_str())
        model, steps = parts["model"], list(_steps(parts["pre_tokenizer"]))
        kinds = {step["type"] for step in steps}
        letters = bytes_to_unicode().values() if "ByteLevel" in kinds else [f"<0x{byte:02X}>" for byte in range(256)]
        if (
            model["type"] != "BPE"
            or not ("ByteLevel" in kinds or model["byte_fallback"])
            # Of a byte without a token nothing would be left.
            or not all(letter in model["vocab"] for letter in letters)
            or not kinds <= KEEPING
            or any(step.get("behavior") == "Removed" for step in steps)
            # Such tokens swallow white space beside them.
            or any(token["lstrip"] or token["rstrip"] for token in parts["added_tokens"])
        ):
            return None
        # A letter of byte-level names is one byte of text.
        names = max(len(name if "ByteLevel" in kinds else name.encode()) for name in model["vocab"])
        return max([names, *(len(token["content"].encode()) for token in parts["added_tokens"])])


def _steps(step: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """A pre-tokenizer's steps."""
    if step is not None and step["type"] == "Sequence":
        for each in step["pretokenizers"]:
            yield from _steps(each)
    elif step is not None:
        yield step
