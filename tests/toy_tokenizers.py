"""Small tokenizers of the kinds that models have, each with special tokens and others that were added."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tests.folders import TEXTS

SPECIAL = ("<|im_start|>", "<|im_end|>", "[INST]", "<s><s>")
"""Special tokens besides `<s>` and `</s>`."""
ADDED = ("<think>", " añadido ")
"""Tokens that were added and are text: not special."""
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789<>|[]/_.,:!?é\n"
PIECES = ("th", "the", "he", "im", "en", "im_", "end", "▁t", "▁th", "▁the", "▁▁", "▁h")
CHATML = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|im_end|>{{ '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_level() -> PreTrainedTokenizerBase:
    """Byte-level BPE, as of Qwen: most characters that are not ASCII take several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([*TEXTS, "im_start im_end " * 3, "für Bäume 😀🎉 " * 2], trainer)
    return _finished(tokenizer)


def normalized_specials() -> PreTrainedTokenizerBase:
    """Byte-level BPE whose special tokens are found after normalisation, as GPT-2's."""
    inner = byte_level().backend_tokenizer
    tokenizer = Tokenizer(inner.model)
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = inner.pre_tokenizer
    tokenizer.decoder = inner.decoder
    return _finished(tokenizer, normalized=True)


def llama() -> PreTrainedTokenizerBase:
    """SentencePiece's BPE as of Llama 2: a space in front of every text, and bytes for unknown characters."""
    tokenizer = _sentence_pieces()
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _finished(tokenizer)


def gemma() -> PreTrainedTokenizerBase:
    """SentencePiece's BPE as of Gemma: no space is added."""
    tokenizer = _sentence_pieces()
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return _finished(tokenizer)


def metaspace() -> PreTrainedTokenizerBase:
    """SentencePiece's BPE with a space in front of the first text alone."""
    tokenizer = _sentence_pieces()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    return _finished(tokenizer)


KINDS: Mapping[str, Callable[[], PreTrainedTokenizerBase]] = {
    "byte_level": byte_level,
    "normalized_specials": normalized_specials,
    "llama": llama,
    "gemma": gemma,
    "metaspace": metaspace,
}


def _sentence_pieces() -> Tokenizer:
    vocabulary = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *LETTERS, *PIECES]
    ids = {piece: number for number, piece in enumerate(vocabulary)}
    pairs = ((piece[:cut], piece[cut:]) for piece in PIECES for cut in range(1, len(piece)))
    merges = [pair for pair in pairs if pair[0] in ids and pair[1] in ids]
    return Tokenizer(models.BPE(vocab=ids, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))


def _finished(tokenizer: Tokenizer, normalized: bool = False) -> PreTrainedTokenizerBase:
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=normalized) for text in ("<s>", "</s>", *SPECIAL)]
    )
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ADDED])
    start = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", start)]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = CHATML
    return fast
