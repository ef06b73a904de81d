"""The bytes that each token adds to an answer's text."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

BYTE = re.compile("<0x([0-9A-F]{2})>")
"""The name of a token that is one byte of a character that the vocabulary lacks."""


class TokenBytes:
    """The bytes of tokens, which joined are the UTF-8 of the text that they decode to.

    A token may be part of a character, so that it has bytes but no text of its own.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, hidden: Collection[int]) -> None:
        """`hidden` are the control tokens that answers do not show."""
        self._tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        decoder = getattr(backend, "decoder", None)
        steps = set(_steps(json.loads(decoder.__getstate__()))) if decoder is not None else set[str]()
        self._by_letters = (
            {letter: byte for byte, letter in bytes_to_unicode().items()} if "ByteLevel" in steps else None
        )
        self._falls_back = "ByteFallback" in steps
        self._hidden = frozenset(hidden)
        self._before = list(tokenizer.encode("a", add_special_tokens=False))
        """Tokens in front of another one, which keep its leading space."""
        self._text_before = self._decode(self._before)

    def of(self, token: int, first: bool) -> bytes:
        """The bytes that a token adds; none for a token without text in answers.

        Some decoders drop the space in front of the `first` token of an answer.
        """
        if not self.has_text(token):
            return b""
        name = str(self._tokenizer.convert_ids_to_tokens(token))
        if self._by_letters is not None:
            if all(letter in self._by_letters for letter in name):
                return bytes(map(self._by_letters.__getitem__, name))
            return name.encode()
        byte = BYTE.fullmatch(name) if self._falls_back else None
        if byte is not None and (not first or byte[1] >= "80"):
            return bytes.fromhex(byte[1])
        if first:
            return self._decode([token]).encode()
        return self._decode([*self._before, token]).removeprefix(self._text_before).encode()

    def has_text(self, token: int) -> bool:
        """Whether a token has text in answers: hidden ones have none, nor ids past the vocabulary."""
        return token not in self._hidden and self._tokenizer.convert_ids_to_tokens(token) is not None

    def name(self, token: int) -> str:
        """The name of a hidden token, such as `<|im_end|>`; empty for others."""
        return str(self._tokenizer.decode([token], skip_special_tokens=False)) if token in self._hidden else ""

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _steps(decoder: Any) -> Iterator[str]:
    """The kinds of a decoder's steps."""
    yield decoder["type"]
    for step in decoder.get("decoders", ()):
        yield from _steps(step)
