"""A tiny model with a tokenizer, saved as a transformers folder."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from bench.fixtures.planted import plant
from tests.models import tiny_model

TEXTS = [
    "The river rose over night and the baker counted his loaves twice before the market opened.",
    "A question: how many apples does Ada have when she gives three of nine apples to her friend?",
    "Summary: the council closed the bridge, traders complained, and repairs will last until spring.",
]
TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)


def save_tiny_model(folder: Path, weak: int = 4, epsilon: float = 0.02, context: int = 512) -> Path:
    """A planted random Llama of 4 + `weak` layers whose vocabulary is a small byte-level BPE."""
    tokenizer = Tokenizer(models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>")
    fast.chat_template = TEMPLATE
    size = tokenizer.get_vocab_size()
    model, _ = plant(tiny_model("llama", seed=6, vocab_size=size, max_position_embeddings=context), epsilon, weak)
    model.save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


def write_prompts(path: Path, text: str, count: int = 14, **more: str) -> Path:
    """Write a file of prompts, each some words of a text."""
    words = text.split()
    lines = [json.dumps({"prompt": " ".join(words[i % 5 : 6 + i]), **more}) for i in range(count)]
    path.write_text("\n".join(lines))
    return path
